// Recurrent layers in a pass. A row is made from the state before its chunk and from its ancestors in the chunk; a chunk's
// rows are folded into a new state when rows of the next one come.
#include <algorithm>
#include <cmath>

#include "stack_pass.h"

namespace foreword {

namespace {

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

void StackPass::plan_states() {
    if (!stack_.recurrent()) return;
    for (int64_t number = 0; number < batch_.requests; ++number) {
        const RequestChunks& chunks = batch_.chunks[static_cast<size_t>(number)];
        const int64_t first = batch_.row_starts[number], last = batch_.row_starts[number + 1];
        const StateChunk& newest = chunks.entered.empty() ? chunks.read : chunks.entered.back();
        RequestStates request{&chunks, first, last - first, chunks.begin - chunks.read.start, newest.ring, {}};
        for (int64_t start = chunks.read.start; start <= newest.start; start += kStateChunk) {
            const bool is_last = start == newest.start;
            const int64_t row = first + std::max<int64_t>(start - chunks.begin, 0);
            const int64_t committed = first + std::min(chunks.run, start + kStateChunk - chunks.begin) - row;
            ChunkSegment segment{row, is_last ? last - row : committed, committed, std::max<int64_t>(chunks.begin - start, 0), -1};
            for (const StateChunk& entered : chunks.entered) {
                if (entered.start == start + kStateChunk) segment.state = entered.state;
            }
            request.segments.push_back(segment);
        }
        requests_.push_back(std::move(request));
    }
}

void StackPass::recur(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    const RecurrentShape& shape = layer.recurrent->shape;
    const int64_t width = shape.value_width(), requests = static_cast<int64_t>(requests_.size());
    if (shape.kind == Recurrence::Convolution) {   // the two gates and the values: the first and the last enter
        pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
            float* entering = heads_ + row * heads_width_;
            for (int64_t i = 0; i < width; ++i) entering[i] *= entering[2 * width + i];
        });
    }
    pool_.share(requests, 1, [&](int64_t number, int64_t) { keep_inputs(layer, requests_[static_cast<size_t>(number)]); });
    for (const RequestStates& request : requests_) {
        pool_.share(request.rows, 1, [&](int64_t row, int64_t) { convolve_row(layer, request, row); });
    }
    if (shape.kind == Recurrence::Convolution) return;
    pool_.share(requests * shape.heads, 1, [&](int64_t task, int64_t) {
        recur_head(layer, requests_[static_cast<size_t>(task / shape.heads)], task % shape.heads, floats_of(thread));
    });
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) { gate_values(layer, row); });
}

const float* StackPass::entering(const Layer& layer, const RequestStates& request, int64_t place) const {
    const RecurrentShape& shape = layer.recurrent->shape;
    const StateChunk& read = request.chunks->read;
    const int64_t channels = shape.channels(), ring_row = place - (shape.kernel - 1);
    if (ring_row < 0) return state_store_->newest(layer.place, read.state) + place * channels;
    if (ring_row < request.known) return state_store_->inputs(layer.place, read.ring) + ring_row * channels;
    return heads_ + (request.row + ring_row - request.known) * heads_width_;
}

// The inputs that later passes need: of the last chunk's rows, and the newest ones before every state that is written.
void StackPass::keep_inputs(const Layer& layer, const RequestStates& request) const {
    const RecurrentShape& shape = layer.recurrent->shape;
    const int64_t channels = shape.channels(), before = shape.kernel - 1;
    const ChunkSegment& last = request.segments.back();
    float* ring = state_store_->inputs(layer.place, request.ring) + last.known * channels;
    for (int64_t i = 0; i < last.rows; ++i) std::copy_n(heads_ + (last.row + i) * heads_width_, channels, ring + i * channels);
    for (size_t place = 0; place + 1 < request.segments.size(); ++place) {
        if (request.segments[place].state < 0) continue;
        float* newest = state_store_->newest(layer.place, request.segments[place].state);
        const int64_t end = static_cast<int64_t>(place + 1) * kStateChunk;   // `before` inputs of the state that is read come first
        for (int64_t i = 0; i < before; ++i) std::copy_n(entering(layer, request, end + i), channels, newest + i * channels);
    }
}

void StackPass::convolve_row(const Layer& layer, const RequestStates& request, int64_t row) const {
    const Recurrent& weights = *layer.recurrent;
    const RecurrentShape& shape = weights.shape;
    const int64_t batch_row = request.row + row, run = request.chunks->run;
    std::vector<const float*> inputs(static_cast<size_t>(shape.kernel));
    int64_t missing = shape.kernel;
    const auto take = [&](int64_t of_request) {
        inputs[static_cast<size_t>(--missing)] = entering(layer, request, shape.kernel - 1 + request.known + of_request);
    };
    int64_t before = row;   // committed rows from here down are read in order
    if (row >= run) {
        uint64_t mask = static_cast<uint64_t>(batch_.ancestor_masks[batch_row]);
        for (; mask != 0 && missing > 0; mask &= ~(uint64_t{1} << (63 - __builtin_clzll(mask)))) take(run + 63 - __builtin_clzll(mask));
        before = run - 1;
    }
    while (missing > 0) take(before--);
    const bool is_alone = shape.kind == Recurrence::Convolution;
    float *out = convolved_ + batch_row * shape.channels(), *gate = heads_ + batch_row * heads_width_ + shape.channels();
    kernels_.convolve(inputs.data(), weights.conv.data(), weights.conv_bias.empty() ? nullptr : weights.conv_bias.data(), shape.kernel,
                      !is_alone, shape.channels(), out);
    if (is_alone) {
        for (int64_t i = 0; i < shape.value_width(); ++i) gate[i] *= out[i];
    }
    if (shape.kind != Recurrence::Delta) return;
    for (int64_t head = 0; head < 2 * shape.key_heads; ++head) {   // queries, then keys
        const std::vector<float>& scale = head < shape.key_heads ? weights.query_scale : weights.key_scale;
        float* one = out + head * shape.key_dim;
        kernels_.rms_norm(one, scale.data(), kKeyEps / static_cast<float>(shape.key_dim), shape.key_dim, one);
    }
}

void StackPass::take_steps(const Layer& layer, const ChunkSegment& segment, int64_t head, float decay) const {
    const Recurrent& weights = *layer.recurrent;
    const RecurrentShape& shape = weights.shape;
    const size_t own = static_cast<size_t>(head);
    const int64_t at = shape.channels() + shape.value_width() + head;
    float *decays = decays_ + head * batch_.rows + segment.row, *strength = strength_ + head * batch_.rows + segment.row;
    for (int64_t i = 0; i < segment.rows; ++i) {
        const int64_t row = segment.row + i, node = i - segment.committed;
        const float* projected = heads_ + row * heads_width_ + at;
        int64_t parent = std::min(i, segment.committed) - 1;   // the newest committed row
        if (node >= 0) {
            const uint64_t mask = static_cast<uint64_t>(batch_.ancestor_masks[row]) & ~(uint64_t{1} << node);
            if (mask != 0) parent = segment.committed + 63 - __builtin_clzll(mask);
        }
        const bool is_delta = shape.kind == Recurrence::Delta;
        float step = softplus(projected[is_delta ? shape.heads : 0] + weights.time_bias[own]);
        if (is_delta) {
            strength[i] = 1.0f / (1.0f + std::exp(-projected[0]));
        } else {
            step = std::min(std::max(step, weights.least_step), weights.most_step);
            const float* values = convolved_ + row * shape.channels() + head * shape.value_dim;
            float* updates = updates_ + row * shape.value_width() + head * shape.value_dim;
            for (int64_t v = 0; v < shape.value_dim; ++v) updates[v] = values[v] * step;
        }
        decays[i] = (parent < 0 ? decay : decays[parent]) + weights.rates[own] * step;
    }
}

void StackPass::recur_head(const Layer& layer, const RequestStates& request, int64_t head, float* scratch) const {
    const RecurrentShape& shape = layer.recurrent->shape;
    const StateChunk& read = request.chunks->read;
    const bool is_delta = shape.kind == Recurrence::Delta;
    const int64_t channels = shape.channels(), width = shape.value_width(), key_head = shape.key_head(head);
    // In the order of the convolution: queries, keys, values; or values, keys, queries.
    const int64_t key_at = (is_delta ? shape.key_width() : width) + key_head * shape.key_dim;
    const int64_t query_at = is_delta ? key_at - shape.key_width() : key_at + shape.key_width();
    const int64_t value_at = (is_delta ? 2 * shape.key_width() : 0) + head * shape.value_dim;
    const float* state = state_store_->matrix(layer.place, read.state, head);
    ChunkRows known{state_store_->keys(layer.place, read.ring, key_head), state_store_->updates(layer.place, read.ring, head),
                    state_store_->decays(layer.place, read.ring, head), shape.key_dim, shape.value_dim, request.known};
    float* spare = scratch + shape.key_dim * kStateChunk;
    for (const ChunkSegment& segment : request.segments) {
        const float *rows = convolved_ + segment.row * channels, *decays = decays_ + head * batch_.rows + segment.row;
        float* updates = updates_ + segment.row * width + head * shape.value_dim;
        take_steps(layer, segment, head, known.count > 0 ? known.decays[known.count - 1] : 0.0f);
        kernels_.recur({shape.key_dim, shape.value_dim, is_delta, state, known, segment.rows, segment.committed,
                        batch_.ancestor_masks + segment.row + segment.committed, rows + query_at, rows + key_at, rows + value_at, channels,
                        decays, strength_ + head * batch_.rows + segment.row, updates, attended_ + segment.row * width + head * shape.value_dim,
                        width});
        if (&segment == &request.segments.back()) break;
        const ChunkRows parts[2] = {known, {rows + key_at, updates, decays, channels, width, segment.rows}};
        float* into = segment.state < 0 ? spare : state_store_->matrix(layer.place, segment.state, head);
        kernels_.fold(state, parts, 2, shape.key_dim, shape.value_dim, into, scratch);
        state = into;
        known.count = 0;
    }
    keep_segment(layer, request, head);
}

// Writes the last chunk's rows of one head to their ring; keys with the first head that shares them.
void StackPass::keep_segment(const Layer& layer, const RequestStates& request, int64_t head) const {
    const RecurrentShape& shape = layer.recurrent->shape;
    const ChunkSegment& last = request.segments.back();
    const int64_t key_head = shape.key_head(head), size = shape.value_dim, group = shape.heads / shape.key_heads;
    const int64_t key_at = (shape.kind == Recurrence::Delta ? shape.key_width() : shape.value_width()) + key_head * shape.key_dim;
    float* updates = state_store_->updates(layer.place, request.ring, head) + last.known * size;
    float* keys = state_store_->keys(layer.place, request.ring, key_head) + last.known * shape.key_dim;
    for (int64_t i = 0; i < last.rows; ++i) {
        std::copy_n(updates_ + (last.row + i) * shape.value_width() + head * size, size, updates + i * size);
        if (head % group == 0) std::copy_n(convolved_ + (last.row + i) * shape.channels() + key_at, shape.key_dim, keys + i * shape.key_dim);
    }
    std::copy_n(decays_ + head * batch_.rows + last.row, last.rows, state_store_->decays(layer.place, request.ring, head) + last.known);
}

// What heads found, through the gates that stand after the channels, into their place.
void StackPass::gate_values(const Layer& layer, int64_t row) const {
    const Recurrent& weights = *layer.recurrent;
    const RecurrentShape& shape = weights.shape;
    const int64_t width = shape.value_width(), size = shape.value_dim;
    float *found = attended_ + row * width, *gate = heads_ + row * heads_width_ + shape.channels();
    if (shape.kind == Recurrence::Delta) {
        for (int64_t head = 0; head < shape.heads; ++head) {
            kernels_.rms_norm(found + head * size, weights.norm.data(), shape_.rms_norm_eps, size, found + head * size);
        }
        return kernels_.silu_mul(gate, found, width);
    }
    const float* values = convolved_ + row * shape.channels();
    for (int64_t i = 0; i < width; ++i) found[i] += weights.skip[static_cast<size_t>(i / size)] * values[i];
    kernels_.silu_mul(gate, found, width);
    const int64_t each = width / weights.norm_groups;
    for (int64_t i = 0; i < width; i += each) kernels_.rms_norm(gate + i, weights.norm.data() + i, shape_.rms_norm_eps, each, gate + i);
}

}  // namespace foreword
