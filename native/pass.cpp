#include "pass.h"

#include <algorithm>

namespace foreword {

Pass::Pass(Decoder& decoder, const PassRows& rows, std::vector<AdaptedRows> adapted, float* logits, float* hidden)
    : StackPass(decoder, rows, 0, std::move(adapted)), decoder_(decoder), logits_(logits), hidden_(hidden) {}

void Pass::run() {
    pool_.run([this](int thread) { work(thread); });
}

void Pass::keep(const float* states) {
    const int64_t last = static_cast<int64_t>(decoder_.layers_.size()) - 1, width = shape_.hidden_size;
    pool_.run([&](int thread) {
        pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
            std::copy_n(states + row * width, width, stream(row));
            turn_row(row);
        });
        read_stream(last, thread);
        keep_rows(last, thread);
    });
}

void Pass::work(int thread) {
    move_rows();
    embed();
    const int64_t layers = static_cast<int64_t>(decoder_.layers_.size());
    for (int64_t index = 0; index < layers; ++index) {
        keep_hidden(index);
        read_stream(index, thread);
        layer(index, thread);
    }
    keep_hidden(layers);
    logits_of_wanted_rows(thread);
}

void Pass::move_rows() {
    if (batch_.copies > 0) {
        pool_.share(store_.layers(), 1, [&](int64_t layer, int64_t) { store_.move(layer, batch_.kv_copies, batch_.copies); });
    }
    if (!batch_.ring_copies.empty()) {
        pool_.share(state_store_->layers(), 1, [&](int64_t layer, int64_t) { state_store_->move(layer, batch_.ring_copies); });
    }
}

void Pass::embed() {
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        float* embedded = stream(row);
        kernels_.dequantize_row(decoder_.embedding_->view(), batch_.token_ids[row], embedded);
        const float scale = decoder_.scales_.embedding;
        for (int64_t d = 0; scale != 1.0f && d < shape_.hidden_size; ++d) embedded[d] *= scale;
        turn_row(row);
    });
}

void Pass::keep_hidden(int64_t index) {
    const int64_t width = shape_.hidden_size, taps = static_cast<int64_t>(batch_.taps.size());
    for (size_t place = 0; place < batch_.taps.size(); ++place) {
        const Tap& tap = batch_.taps[place];
        if (tap.layer != index) continue;
        pool_.share(batch_.hidden_wanted, 1, [&](int64_t i, int64_t) {
            const float* row = stream(batch_.hidden_rows[i]);
            float* out = hidden_ + (i * taps + static_cast<int64_t>(place)) * width;
            if (tap.normed) final_norm(row, out);
            else std::copy_n(row, width, out);
        });
    }
}

void Pass::final_norm(const float* row, float* out) const {
    kernels_.rms_norm(row, decoder_.final_norm_.data(), shape_.rms_norm_eps, shape_.hidden_size, out);
}

void Pass::logits_of_wanted_rows(int thread) {
    if (batch_.wanted == 0) return;
    const PackedMatrix& head = *decoder_.head_;
    const ActivationView into = activations(head, batch_.wanted);
    std::vector<float> normed(static_cast<size_t>(shape_.hidden_size));
    pool_.share(batch_.wanted, 1, [&](int64_t i, int64_t) {
        final_norm(stream(batch_.logit_rows[i]), normed.data());
        fill_row(head, normed.data(), i, into);
    });
    linears({{&head, {logits_, decoder_.vocab_size(), nullptr, false}}}, into, thread);
    const float scale = decoder_.scales_.logits, softcap = decoder_.scales_.softcap;
    if (scale == 1.0f && softcap == 0.0f) return;
    pool_.share(batch_.wanted, 1, [&](int64_t i, int64_t) {
        float* row = logits_ + i * decoder_.vocab_size();
        for (int64_t token = 0; scale != 1.0f && token < decoder_.vocab_size(); ++token) row[token] *= scale;
        if (softcap > 0.0f) kernels_.squash(row, softcap, decoder_.vocab_size());
    });
}

}  // namespace foreword
