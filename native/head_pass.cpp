#include "head_pass.h"

#include <algorithm>

namespace foreword {

HeadPass::HeadPass(Head& head, const HeadRows& rows, KvStore& store, size_t kind, float* logits, float* states)
    : StackPass(head, {rows.batch, store, kind, rows.starts}, std::max(head.head_.feature_width, 2 * head.shape().hidden_size)),
      head_(head), features_(rows.features), are_own_(rows.are_own), logits_(logits), states_(states) {}

void HeadPass::run() {
    pool_.run([this](int thread) { work(thread); });
}

void HeadPass::work(int thread) {
    switch (head_.head_.join) {
        case Join::SideBySide:
            reduce_features(thread);
            join_side_by_side(thread);
            break;
        case Join::Fused:
            join_fused(thread);
            read_stream(0, thread);
            break;
        case Join::Context:
            if (!are_own_) return keep_context(thread);
            read_tokens();
            read_stream(0, thread);
            break;
    }
    const int64_t layers = static_cast<int64_t>(head_.layers_.size());
    for (int64_t index = 0; index < layers; ++index) {
        if (index > 0) read_stream(index, thread);
        layer(index, thread);
    }
    finish(thread);
}

// Copies where there is no norm.
void HeadPass::norm(const float* values, const std::vector<float>& weight, int64_t size, float* out) const {
    if (!weight.empty()) kernels_.rms_norm(values, weight.data(), shape_.rms_norm_eps, size, out);
    else if (out != values) std::copy_n(values, size, out);
}

void HeadPass::embed(int64_t row, float* out) const {
    kernels_.dequantize_row(head_.embedding_->view(), batch_.token_ids[row], out);
    norm(out, head_.inputs_.embedding_norm, shape_.hidden_size, out);
}

// The target's features become the stream; the head's own are it already.
void HeadPass::reduce_features(int thread) {
    const HeadInputs& inputs = head_.inputs_;
    const int64_t width = head_.feature_width(are_own_), hidden = shape_.hidden_size;
    if (are_own_ || !inputs.fc) {
        pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) { std::copy_n(features_ + row * hidden, hidden, stream(row)); });
        return;
    }
    const PackedMatrix& fc = *inputs.fc;
    const ActivationView into = activations(fc, batch_.rows);
    const int64_t parts = static_cast<int64_t>(inputs.feature_norms.size());
    float* normed = floats_of(thread);
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        const float* values = features_ + row * width;
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t size = width / parts;
            norm(values + part * size, inputs.feature_norms[static_cast<size_t>(part)], size, normed + part * size);
        }
        fill_row(fc, parts > 0 ? normed : values, row, into);
    });
    linears({{&fc, {stream_, hidden, nullptr, false}}}, into, thread);
}

void HeadPass::join_side_by_side(int thread) {
    const PackedMatrix& reader = *head_.layers_.front().inputs.front();
    const ActivationView into = activations(reader, batch_.rows);
    const int64_t hidden = shape_.hidden_size;
    float* both = floats_of(thread);
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        turn_row(row);
        embed(row, both);
        norm(stream(row), head_.inputs_.hidden_norm, hidden, both + hidden);
        if (head_.head_.norm_before_residual) std::copy_n(both + hidden, hidden, stream(row));
        fill_row(reader, both, row, into);
    });
}

void HeadPass::join_fused(int thread) {
    const PackedMatrix& fc = *head_.inputs_.fc;
    const ActivationView into = activations(fc, batch_.rows);
    const int64_t hidden = shape_.hidden_size;
    float* both = floats_of(thread);
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        turn_row(row);
        embed(row, both);
        norm(features_ + row * hidden, head_.inputs_.hidden_norm, hidden, both + hidden);
        fill_row(fc, both, row, into);
    });
    linears({{&fc, {stream_, hidden, nullptr, false}}}, into, thread);
}

void HeadPass::keep_context(int thread) {
    reduce_features(thread);
    const PackedMatrix& reader = *head_.layers_.front().inputs[1];
    const ActivationView into = activations(reader, batch_.rows);
    float* normed = floats_of(thread);
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        turn_row(row);
        norm(stream(row), head_.inputs_.hidden_norm, shape_.hidden_size, normed);
        fill_row(reader, normed, row, into);
    });
    const int64_t layers = static_cast<int64_t>(head_.layers_.size());
    for (int64_t index = 0; index < layers; ++index) keep_rows(index, thread);
}

void HeadPass::read_tokens() {
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        turn_row(row);
        embed(row, stream(row));
    });
}

void HeadPass::finish(int thread) {
    if (batch_.wanted == 0) return;
    const PackedMatrix& output = *head_.output_;
    const ActivationView into = activations(output, batch_.wanted);
    const int64_t hidden = shape_.hidden_size;
    float* normed = floats_of(thread);
    pool_.share(batch_.wanted, 1, [&](int64_t i, int64_t) {
        const float* last = stream(batch_.logit_rows[i]);
        norm(last, head_.final_norm_, hidden, normed);
        std::copy_n(head_.head_.norm_output ? normed : last, hidden, states_ + i * hidden);
        fill_row(output, normed, i, into);
    });
    linears({{&output, {logits_, head_.head_.draft_vocab_size, nullptr, false}}}, into, thread);
}

MarkovPass::MarkovPass(Head& head, const Batch& before, KvStore& store, size_t kind, float* logits)
    : StackPass(head, {before, store, kind, nullptr}, head.after_->view().cols), head_(head), logits_(logits) {}

void MarkovPass::run() {
    const PackedMatrix& after = *head_.after_;
    const ActivationView into = activations(after, batch_.rows);
    pool_.run([&](int thread) {
        float* read = floats_of(thread);
        pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
            kernels_.dequantize_row(head_.before_->view(), batch_.token_ids[row], read);
            fill_row(after, read, row, into);
        });
        linears({{&after, {logits_, head_.head_.draft_vocab_size, nullptr, true}}}, into, thread);
    });
}

}  // namespace foreword
