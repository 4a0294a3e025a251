#include "head_pass.h"

#include <algorithm>

namespace foreword {

HeadPass::HeadPass(Head& head, const HeadRows& rows, KvStore& store, size_t kind, float* logits, float* states)
    : StackPass(head, {rows.batch, store, kind, rows.starts}, std::max(head.head_shape_.feature_width, 2 * head.shape().hidden_size)),
      head_(head), features_(rows.features), are_own_states_(rows.are_own_states), logits_(logits), states_(states) {}

void HeadPass::run() {
    pool_.run([this](int thread) { work(thread); });
}

void HeadPass::work(int thread) {
    switch (head_.head_shape_.join) {
        case Join::Concat:
            reduce_features(thread);
            join_concat(thread);
            break;
        case Join::Fused:
            join_fused(thread);
            norm_layer_input(0, thread);
            break;
        case Join::Context:
            if (!are_own_states_) return store_context(thread);
            embed_tokens();
            norm_layer_input(0, thread);
            break;
    }
    const int64_t layers = static_cast<int64_t>(head_.layers_.size());
    for (int64_t index = 0; index < layers; ++index) {
        if (index > 0) norm_layer_input(index, thread);
        run_layer(index, thread);
    }
    compute_logits_and_states(thread);
}

void HeadPass::norm(const float* values, const std::vector<float>& weight, int64_t size, float* out) const {
    if (!weight.empty()) kernels_.rms_norm(values, weight.data(), shape_.rms_norm_eps, size, out);
    else if (out != values) std::copy_n(values, size, out);
}

void HeadPass::embed(int64_t row, float* out) const {
    kernels_.dequantize_row(head_.embedding_->view(), batch_.token_ids[row], out);
    norm(out, head_.inputs_.embedding_norm, shape_.hidden_size, out);
    if (const float scale = head_.selector_.embedding_scale; scale != 1.0f) {
        for (int64_t d = 0; d < shape_.hidden_size; ++d) out[d] *= scale;
    }
}

void HeadPass::reduce_features(int thread) {
    const HeadInputs& inputs = head_.inputs_;
    const int64_t width = head_.feature_width(are_own_states_), hidden = shape_.hidden_size;
    if (are_own_states_ || !inputs.fc) {
        pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) { std::copy_n(features_ + row * hidden, hidden, stream(row)); });
        return;
    }
    const PackedMatrix& fc = *inputs.fc;
    const ActivationView input = linear_input(fc, batch_.rows);
    const int64_t parts = static_cast<int64_t>(inputs.feature_norms.size());
    float* normed = scratch_of(thread);
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        const float* values = features_ + row * width;
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t size = width / parts;
            norm(values + part * size, inputs.feature_norms[static_cast<size_t>(part)], size, normed + part * size);
        }
        set_input_row(fc, parts > 0 ? normed : values, row, input);
    });
    run_linears({{&fc, {stream_, hidden, nullptr, false}}}, input, thread);
}

void HeadPass::join_concat(int thread) {
    const PackedMatrix& reader = *head_.layers_.front().input_projections.front();
    const ActivationView input = linear_input(reader, batch_.rows);
    const int64_t hidden = shape_.hidden_size;
    float* embedding_and_features = scratch_of(thread);
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        compute_rope_angles(row);
        embed(row, embedding_and_features);
        norm(stream(row), head_.inputs_.hidden_norm, hidden, embedding_and_features + hidden);
        if (head_.head_shape_.norm_before_residual) std::copy_n(embedding_and_features + hidden, hidden, stream(row));
        set_input_row(reader, embedding_and_features, row, input);
    });
}

void HeadPass::join_fused(int thread) {
    const PackedMatrix& fc = *head_.inputs_.fc;
    const ActivationView input = linear_input(fc, batch_.rows);
    const int64_t hidden = shape_.hidden_size;
    float* embedding_and_features = scratch_of(thread);
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        compute_rope_angles(row);
        embed(row, embedding_and_features);
        norm(features_ + row * hidden, head_.inputs_.hidden_norm, hidden, embedding_and_features + hidden);
        set_input_row(fc, embedding_and_features, row, input);
    });
    run_linears({{&fc, {stream_, hidden, nullptr, false}}}, input, thread);
}

void HeadPass::store_context(int thread) {
    reduce_features(thread);
    const PackedMatrix& reader = *head_.layers_.front().input_projections[1];
    const ActivationView input = linear_input(reader, batch_.rows);
    float* normed = scratch_of(thread);
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        compute_rope_angles(row);
        norm(stream(row), head_.inputs_.hidden_norm, shape_.hidden_size, normed);
        set_input_row(reader, normed, row, input);
    });
    const int64_t layers = static_cast<int64_t>(head_.layers_.size());
    for (int64_t index = 0; index < layers; ++index) store_kv_rows(index, thread);
}

void HeadPass::embed_tokens() {
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        compute_rope_angles(row);
        embed(row, stream(row));
    });
}

void HeadPass::compute_logits_and_states(int thread) {
    if (batch_.logit_count == 0) return;
    const PackedMatrix& output_matrix = *head_.output_;
    const ActivationView input = linear_input(output_matrix, batch_.logit_count);
    const int64_t hidden = shape_.hidden_size;
    float* normed = scratch_of(thread);
    pool_.parallel_for(batch_.logit_count, 1, [&](int64_t i, int64_t) {
        const float* output_row = stream(batch_.logit_rows[i]);
        norm(output_row, head_.final_norm_, hidden, normed);
        std::copy_n(head_.head_shape_.norm_output ? normed : output_row, hidden, states_ + i * hidden);
        set_input_row(output_matrix, normed, i, input);
    });
    run_linears({{&output_matrix, {logits_, head_.head_shape_.draft_vocab_size, nullptr, false}}}, input, thread);
}

MarkovPass::MarkovPass(Head& head, const Batch& previous_tokens, KvStore& store, size_t kind, float* logits)
    : StackPass(head, {previous_tokens, store, kind, nullptr}, head.markov_output_->view().cols), head_(head), logits_(logits) {}

void MarkovPass::run() {
    const PackedMatrix& output_matrix = *head_.markov_output_;
    const ActivationView input = linear_input(output_matrix, batch_.rows);
    pool_.run([&](int thread) {
        float* embedding = scratch_of(thread);
        pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
            kernels_.dequantize_row(head_.markov_embedding_->view(), batch_.token_ids[row], embedding);
            set_input_row(output_matrix, embedding, row, input);
        });
        run_linears({{&output_matrix, {logits_, head_.head_shape_.draft_vocab_size, nullptr, true}}}, input, thread);
    });
}

SelectorPass::SelectorPass(Head& head, const Batch& rows, KvStore& store, size_t kind, const float* states, float* projected)
    : StackPass(head, {rows, store, kind, nullptr}, head.shape().hidden_size), head_(head), states_(states), projected_(projected) {}

void SelectorPass::run() {
    const PackedMatrix& projection = *head_.selector_.projection;
    pool_.run([&](int thread) {
        set_input_rows(states_, shape_.hidden_size, projection, {}, thread);
        run_linears({{&projection, {projected_, projection.view().rows, nullptr, false}}}, linear_input(projection, batch_.rows), thread);
    });
}

}  // namespace foreword
