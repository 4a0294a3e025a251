#include "pass.h"

#include <algorithm>

namespace foreword {

Pass::Pass(Decoder& decoder, const PassRows& rows, std::vector<AdaptedRows> adapted_rows, float* logits, float* hidden)
    : StackPass(decoder, rows, 0, std::move(adapted_rows)), decoder_(decoder), logits_(logits), hidden_(hidden) {}

void Pass::run() {
    pool_.run([this](int thread) { work(thread); });
}

void Pass::store_last_layer_kv(const float* states) {
    const int64_t last = static_cast<int64_t>(decoder_.layers_.size()) - 1, width = shape_.hidden_size;
    pool_.run([&](int thread) {
        pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
            std::copy_n(states + row * width, width, stream(row));
            compute_rope_angles(row);
        });
        norm_layer_input(last, thread);
        store_kv_rows(last, thread);
    });
}

void Pass::work(int thread) {
    copy_rows();
    embed();
    const int64_t layers = static_cast<int64_t>(decoder_.layers_.size());
    for (int64_t index = 0; index < layers; ++index) {
        store_hidden(index);
        norm_layer_input(index, thread);
        run_layer(index, thread);
    }
    store_hidden(layers);
    compute_logits(thread);
}

void Pass::copy_rows() {
    if (batch_.copies > 0) {
        pool_.parallel_for(store_.layers(), 1, [&](int64_t layer, int64_t) { store_.copy_rows(layer, batch_.kv_copies, batch_.copies); });
    }
    if (!batch_.ring_copies.empty()) {
        pool_.parallel_for(state_store_->layers(), 1, [&](int64_t layer, int64_t) { state_store_->copy_rows(layer, batch_.ring_copies); });
    }
}

void Pass::embed() {
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        float* embedded = stream(row);
        kernels_.dequantize_row(decoder_.embedding_->view(), batch_.token_ids[row], embedded);
        const float scale = decoder_.scales_.embedding;
        for (int64_t d = 0; scale != 1.0f && d < shape_.hidden_size; ++d) embedded[d] *= scale;
        compute_rope_angles(row);
    });
}

void Pass::store_hidden(int64_t index) {
    const int64_t width = shape_.hidden_size, taps = static_cast<int64_t>(batch_.taps.size());
    for (size_t t = 0; t < batch_.taps.size(); ++t) {
        const Tap& tap = batch_.taps[t];
        if (tap.layer != index) continue;
        pool_.parallel_for(batch_.hidden_count, 1, [&](int64_t i, int64_t) {
            const float* row = stream(batch_.hidden_rows[i]);
            float* out = hidden_ + (i * taps + static_cast<int64_t>(t)) * width;
            if (tap.is_normed) final_norm(row, out);
            else std::copy_n(row, width, out);
        });
    }
}

void Pass::final_norm(const float* row, float* out) const {
    kernels_.rms_norm(row, decoder_.final_norm_.data(), shape_.rms_norm_eps, shape_.hidden_size, out);
}

void Pass::compute_logits(int thread) {
    if (batch_.logit_count == 0) return;
    const PackedMatrix& head = *decoder_.head_;
    const ActivationView input = linear_input(head, batch_.logit_count);
    std::vector<float> normed(static_cast<size_t>(shape_.hidden_size));
    pool_.parallel_for(batch_.logit_count, 1, [&](int64_t i, int64_t) {
        final_norm(stream(batch_.logit_rows[i]), normed.data());
        set_input_row(head, normed.data(), i, input);
    });
    run_linears({{&head, {logits_, decoder_.vocab_size(), nullptr, false}}}, input, thread);
    const float scale = decoder_.scales_.logits, softcap = decoder_.scales_.softcap;
    if (scale == 1.0f && softcap == 0.0f) return;
    pool_.parallel_for(batch_.logit_count, 1, [&](int64_t i, int64_t) {
        float* row = logits_ + i * decoder_.vocab_size();
        for (int64_t token = 0; scale != 1.0f && token < decoder_.vocab_size(); ++token) row[token] *= scale;
        if (softcap > 0.0f) kernels_.softcap(row, softcap, decoder_.vocab_size());
    });
}

}  // namespace foreword
