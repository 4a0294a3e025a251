// Recurrent layers in a pass. The output of a token is computed from the state before its chunk and the rows of its
// ancestors in the chunk. When a request enters the next chunk, a new state is computed from the old one and the chunk's rows.
#include <algorithm>
#include <cmath>

#include "stack_pass.h"

namespace foreword {

namespace {

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

void StackPass::plan_states() {
    if (!stack_.first_recurrent()) return;
    for (int64_t index = 0; index < batch_.requests; ++index) {
        const RequestChunks& chunks = batch_.chunks[static_cast<size_t>(index)];
        const int64_t begin = batch_.row_starts[index], end = batch_.row_starts[index + 1];
        const StateChunk& last_chunk = chunks.entered.empty() ? chunks.read : chunks.entered.back();
        RequestStates request{&chunks, begin, end - begin, chunks.begin - chunks.read.start, last_chunk.ring, {}};
        for (int64_t start = chunks.read.start; start <= last_chunk.start; start += kStateChunk) {
            const bool is_last = start == last_chunk.start;
            const int64_t row = begin + std::max<int64_t>(start - chunks.begin, 0);
            const int64_t committed_rows = begin + std::min(chunks.run, start + kStateChunk - chunks.begin) - row;
            const int64_t rows_before = std::max<int64_t>(chunks.begin - start, 0);
            ChunkSegment segment{row, is_last ? end - row : committed_rows, committed_rows, rows_before, -1};
            for (const StateChunk& entered : chunks.entered) {
                if (entered.start == start + kStateChunk) segment.next_state = entered.state;
            }
            request.segments.push_back(segment);
        }
        requests_.push_back(std::move(request));
    }
}

void StackPass::run_recurrence(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    const RecurrentShape& shape = layer.recurrent->shape;
    const int64_t width = shape.value_width(), requests = static_cast<int64_t>(requests_.size());
    if (shape.kind == Recurrence::Convolution) {   // a row has B, C and x: B * x enters the convolution, C gates its output
        pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
            float* projected = projected_ + row * projected_width_;
            for (int64_t i = 0; i < width; ++i) projected[i] *= projected[2 * width + i];
        });
    }
    pool_.parallel_for(requests, 1, [&](int64_t i, int64_t) { store_recurrent_inputs(layer, requests_[static_cast<size_t>(i)]); });
    for (const RequestStates& request : requests_) {
        pool_.parallel_for(request.rows, 1, [&](int64_t row, int64_t) { convolve_recurrent_row(layer, request, row); });
    }
    if (shape.kind == Recurrence::Convolution) return;
    pool_.parallel_for(requests * shape.heads, 1, [&](int64_t task, int64_t) {
        run_recurrent_head(layer, requests_[static_cast<size_t>(task / shape.heads)], task % shape.heads, scratch_of(thread));
    });
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) { gate_head_outputs(layer, row); });
}

const float* StackPass::recurrent_input(const Layer& layer, const RequestStates& request, int64_t index) const {
    const RecurrentShape& shape = layer.recurrent->shape;
    const StateChunk& read = request.chunks->read;
    const int64_t channels = shape.channels(), ring_row = index - (shape.kernel_size - 1);
    if (ring_row < 0) return state_store_->last_inputs(layer.store_layer, read.state) + index * channels;
    if (ring_row < request.rows_before) return state_store_->ring_inputs(layer.store_layer, read.ring) + ring_row * channels;
    return projected_ + (request.row + ring_row - request.rows_before) * projected_width_;
}

// Stores the inputs that later passes read: those of the last segment's rows in the ring, and the last ones before every
// state that is written.
void StackPass::store_recurrent_inputs(const Layer& layer, const RequestStates& request) const {
    const RecurrentShape& shape = layer.recurrent->shape;
    const int64_t channels = shape.channels(), history = shape.kernel_size - 1;
    const ChunkSegment& last = request.segments.back();
    float* ring = state_store_->ring_inputs(layer.store_layer, request.ring) + last.rows_before * channels;
    for (int64_t i = 0; i < last.rows; ++i) std::copy_n(projected_ + (last.row + i) * projected_width_, channels, ring + i * channels);
    for (size_t segment = 0; segment + 1 < request.segments.size(); ++segment) {
        if (request.segments[segment].next_state < 0) continue;
        float* last_inputs = state_store_->last_inputs(layer.store_layer, request.segments[segment].next_state);
        // Input 0 is `history` positions before the start of the first chunk, so this is the index of the first of the last
        // `history` inputs of this chunk.
        const int64_t first = static_cast<int64_t>(segment + 1) * kStateChunk;
        for (int64_t i = 0; i < history; ++i) std::copy_n(recurrent_input(layer, request, first + i), channels, last_inputs + i * channels);
    }
}

// Convolves row `row` of a request. LFM2: multiplies the gate C with the result. Delta: norms queries and keys.
void StackPass::convolve_recurrent_row(const Layer& layer, const RequestStates& request, int64_t row) const {
    const Recurrent& weights = *layer.recurrent;
    const RecurrentShape& shape = weights.shape;
    const int64_t batch_row = request.row + row, run = request.chunks->run;
    std::vector<const float*> inputs(static_cast<size_t>(shape.kernel_size));   // oldest first, filled from the end
    int64_t missing = shape.kernel_size;
    const auto add_input = [&](int64_t row_in_request) {   // negative: a row before this pass
        const int64_t index = shape.kernel_size - 1 + request.rows_before + row_in_request;
        inputs[static_cast<size_t>(--missing)] = recurrent_input(layer, request, index);
    };
    int64_t next_row = row;   // of the committed rows
    if (row >= run) {         // a draft node: first its ancestors among the nodes, from the deepest up
        uint64_t mask = static_cast<uint64_t>(batch_.ancestor_masks[batch_row]);
        for (; mask != 0 && missing > 0; mask &= ~(uint64_t{1} << (63 - __builtin_clzll(mask)))) add_input(run + 63 - __builtin_clzll(mask));
        next_row = run - 1;
    }
    while (missing > 0) add_input(next_row--);
    const bool is_convolution_only = shape.kind == Recurrence::Convolution;
    float *out = recurrent_convolved_ + batch_row * shape.channels(), *gate = projected_ + batch_row * projected_width_ + shape.channels();
    kernels_.convolve(inputs.data(), weights.conv.data(), weights.conv_bias.empty() ? nullptr : weights.conv_bias.data(), shape.kernel_size,
                      !is_convolution_only, shape.channels(), out);
    if (is_convolution_only) {
        for (int64_t i = 0; i < shape.value_width(); ++i) gate[i] *= out[i];
    }
    if (shape.kind != Recurrence::Delta) return;
    for (int64_t i = 0; i < 2 * shape.key_heads; ++i) {   // the heads of queries, then those of keys
        const std::vector<float>& scale = i < shape.key_heads ? weights.query_scale : weights.key_scale;
        float* head = out + i * shape.key_dim;
        kernels_.rms_norm(head, scale.data(), kKeyEps / static_cast<float>(shape.key_dim), shape.key_dim, head);
    }
}

void StackPass::compute_decays_and_updates(const Layer& layer, const ChunkSegment& segment, int64_t head, float log_decay_before) const {
    const Recurrent& weights = *layer.recurrent;
    const RecurrentShape& shape = weights.shape;
    const size_t head_index = static_cast<size_t>(head);
    const int64_t per_head_offset = shape.channels() + shape.value_width() + head;
    float *log_decay_sums = log_decay_sums_ + head * batch_.rows + segment.row, *betas = betas_ + head * batch_.rows + segment.row;
    for (int64_t i = 0; i < segment.rows; ++i) {
        const int64_t row = segment.row + i, node = i - segment.committed_rows;
        const float* projected = projected_ + row * projected_width_ + per_head_offset;
        int64_t parent = std::min(i, segment.committed_rows) - 1;   // the row before; of a draft node, the last committed row
        if (node >= 0) {   // a draft node: its nearest ancestor among the nodes, if it has one
            const uint64_t mask = static_cast<uint64_t>(batch_.ancestor_masks[row]) & ~(uint64_t{1} << node);
            if (mask != 0) parent = segment.committed_rows + 63 - __builtin_clzll(mask);
        }
        const bool is_delta = shape.kind == Recurrence::Delta;
        float time_step = softplus(projected[is_delta ? shape.heads : 0] + weights.time_bias[head_index]);
        if (is_delta) {
            betas[i] = 1.0f / (1.0f + std::exp(-projected[0]));
        } else {
            time_step = std::min(std::max(time_step, weights.min_time_step), weights.max_time_step);
            const float* values = recurrent_convolved_ + row * shape.channels() + head * shape.value_dim;
            float* updates = updates_ + row * shape.value_width() + head * shape.value_dim;
            for (int64_t v = 0; v < shape.value_dim; ++v) updates[v] = values[v] * time_step;
        }
        log_decay_sums[i] = (parent < 0 ? log_decay_before : log_decay_sums[parent]) + weights.log_decay_rates[head_index] * time_step;
    }
}

// Computes the outputs of one head, segment by segment, the states after all segments but the last, and the ring rows of
// the last one.
void StackPass::run_recurrent_head(const Layer& layer, const RequestStates& request, int64_t head, float* scratch) const {
    const RecurrentShape& shape = layer.recurrent->shape;
    const StateChunk& read = request.chunks->read;
    const bool is_delta = shape.kind == Recurrence::Delta;
    const int64_t channels = shape.channels(), width = shape.value_width(), key_head = shape.key_head(head);
    // Channels are queries, keys, values in Delta layers, and values, keys, queries in Mamba-2.
    const int64_t key_offset = (is_delta ? shape.key_width() : width) + key_head * shape.key_dim;
    const int64_t query_offset = is_delta ? key_offset - shape.key_width() : key_offset + shape.key_width();
    const int64_t value_offset = (is_delta ? 2 * shape.key_width() : 0) + head * shape.value_dim;
    const float* state = state_store_->matrix(layer.store_layer, read.state, head);
    ChunkRows ring_rows{state_store_->ring_keys(layer.store_layer, read.ring, key_head),
                        state_store_->ring_updates(layer.store_layer, read.ring, head),
                        state_store_->ring_log_decay_sums(layer.store_layer, read.ring, head), shape.key_dim, shape.value_dim, request.rows_before};
    float* unstored_state = scratch + shape.key_dim * kStateChunk;
    for (const ChunkSegment& segment : request.segments) {
        const float *rows = recurrent_convolved_ + segment.row * channels, *log_decay_sums = log_decay_sums_ + head * batch_.rows + segment.row;
        float* updates = updates_ + segment.row * width + head * shape.value_dim;
        compute_decays_and_updates(layer, segment, head, ring_rows.count > 0 ? ring_rows.log_decay_sums[ring_rows.count - 1] : 0.0f);
        kernels_.recurrent_rows({shape.key_dim, shape.value_dim, is_delta, state, ring_rows, segment.rows, segment.committed_rows,
                                 batch_.ancestor_masks + segment.row + segment.committed_rows, rows + query_offset, rows + key_offset,
                                 rows + value_offset, channels, log_decay_sums, betas_ + head * batch_.rows + segment.row, updates,
                                 head_outputs_ + segment.row * width + head * shape.value_dim, width});
        if (&segment == &request.segments.back()) break;
        const ChunkRows pieces[2] = {ring_rows, {rows + key_offset, updates, log_decay_sums, channels, width, segment.rows}};
        float* next = segment.next_state < 0 ? unstored_state : state_store_->matrix(layer.store_layer, segment.next_state, head);
        kernels_.update_state(state, pieces, 2, shape.key_dim, shape.value_dim, next, scratch);
        state = next;
        ring_rows.count = 0;   // only the first chunk has rows from earlier passes
    }
    store_ring_rows(layer, request, head);
}

// Stores the updates and log decay sums of the last segment's rows for one head, and their keys if the head is the first of
// those that share a key head.
void StackPass::store_ring_rows(const Layer& layer, const RequestStates& request, int64_t head) const {
    const RecurrentShape& shape = layer.recurrent->shape;
    const ChunkSegment& last = request.segments.back();
    const int64_t key_head = shape.key_head(head), dim = shape.value_dim, heads_per_key_head = shape.heads / shape.key_heads;
    const int64_t key_offset = (shape.kind == Recurrence::Delta ? shape.key_width() : shape.value_width()) + key_head * shape.key_dim;
    float* updates = state_store_->ring_updates(layer.store_layer, request.ring, head) + last.rows_before * dim;
    float* keys = state_store_->ring_keys(layer.store_layer, request.ring, key_head) + last.rows_before * shape.key_dim;
    for (int64_t i = 0; i < last.rows; ++i) {
        std::copy_n(updates_ + (last.row + i) * shape.value_width() + head * dim, dim, updates + i * dim);
        if (head % heads_per_key_head == 0) {
            std::copy_n(recurrent_convolved_ + (last.row + i) * shape.channels() + key_offset, shape.key_dim, keys + i * shape.key_dim);
        }
    }
    std::copy_n(log_decay_sums_ + head * batch_.rows + last.row, last.rows,
                state_store_->ring_log_decay_sums(layer.store_layer, request.ring, head) + last.rows_before);
}

// Replaces the gates in a row of `projected_` by the input of the output projection. Delta: silu(gate) * norm(output);
// Mamba-2: norm(silu(gate) * (output + skip * values)).
void StackPass::gate_head_outputs(const Layer& layer, int64_t row) const {
    const Recurrent& weights = *layer.recurrent;
    const RecurrentShape& shape = weights.shape;
    const int64_t width = shape.value_width(), dim = shape.value_dim;
    float *outputs = head_outputs_ + row * width, *gate = projected_ + row * projected_width_ + shape.channels();
    if (shape.kind == Recurrence::Delta) {
        for (int64_t head = 0; head < shape.heads; ++head) {
            kernels_.rms_norm(outputs + head * dim, weights.norm.data(), shape_.rms_norm_eps, dim, outputs + head * dim);
        }
        return kernels_.silu_mul(gate, outputs, width);
    }
    const float* values = recurrent_convolved_ + row * shape.channels();
    for (int64_t i = 0; i < width; ++i) outputs[i] += weights.skip[static_cast<size_t>(i / dim)] * values[i];
    kernels_.silu_mul(gate, outputs, width);
    const int64_t group_width = width / weights.norm_groups;
    for (int64_t i = 0; i < width; i += group_width) {
        kernels_.rms_norm(gate + i, weights.norm.data() + i, shape_.rms_norm_eps, group_width, gate + i);
    }
}

}  // namespace foreword
