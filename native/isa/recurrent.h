// Kernels of recurrent layers. The output of a row is one sum over the state and the row's ancestors in the chunk, in a fixed
// order. So its bits depend neither on the other rows of the pass nor on whether ancestors are ring rows or new.
// docs/design.md has the formulas ("States of recurrent layers").
#pragma once

#include "../types.h"
#include "activations.h"

namespace {

using namespace foreword;

void convolve(const float* const* inputs, const float* weights, const float* bias, int64_t kernel_size, bool with_silu, int64_t n,
              float* out) {
    for (int64_t i = 0; i < n; i += 8) {
        const int64_t count = n - i;
        F32x8 sum = mul(load_part(inputs[0] + i, count), load_part(weights + i, count));
        for (int64_t j = 1; j < kernel_size; ++j) sum = fma(load_part(inputs[j] + i, count), load_part(weights + j * n + i, count), sum);
        if (bias) sum = add(sum, load_part(bias + i, count));
        store_part(out + i, with_silu ? silu(sum) : sum, count);
    }
}

// Multiplies Q queries (or keys) with 8 * V columns of a state. Each product is a sum over the key dimensions, in order.
template <int Q, int V>
FOREWORD_INLINE void read_columns(const float* state, int64_t key_dim, int64_t value_dim, const float* queries, int64_t stride,
                                  float* out, int64_t out_stride) {
    F32x8 sums[Q][V];
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) sums[q][i] = set1(0.0f);
    }
    for (int64_t d = 0; d < key_dim; ++d) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const F32x8 eight = load(state + d * value_dim + 8 * i);
#pragma GCC unroll 4
            for (int q = 0; q < Q; ++q) sums[q][i] = fma(eight, queries[q * stride + d], sums[q][i]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) store(out + q * out_stride + 8 * i, sums[q][i]);
    }
}

template <int Q>
FOREWORD_INLINE void read_state_for(const RecurrentTask& task, const float* queries, float* out) {
    constexpr int V = Q > 2 ? 2 : 4;   // all sums stay in registers
    int64_t v = 0;
    for (; v + 8 * V <= task.value_dim; v += 8 * V) {
        read_columns<Q, V>(task.state + v, task.key_dim, task.value_dim, queries, task.stride, out + v, task.out_stride);
    }
    for (; v < task.value_dim; v += 8) {
        read_columns<Q, 1>(task.state + v, task.key_dim, task.value_dim, queries, task.stride, out + v, task.out_stride);
    }
}

// Multiplies the queries (or keys) of all new rows with the state.
FOREWORD_INLINE void read_state(const RecurrentTask& task, const float* queries, float* out) {
    int64_t row = 0;
    for (; row + 4 <= task.rows; row += 4) read_state_for<4>(task, queries + row * task.stride, out + row * task.out_stride);
    for (; row < task.rows; ++row) read_state_for<1>(task, queries + row * task.stride, out + row * task.out_stride);
}

FOREWORD_INLINE float dot_product(const float* a, const float* b, int64_t n) {
    F32x8 sum = set1(0.0f);
    for (int64_t i = 0; i < n; i += 8) sum = fma(load_part(a + i, n - i), load_part(b + i, n - i), sum);
    return sum_lanes(sum);
}

// A log decay below this counts as a decay of 0: denormal products would be a hundred times slower.
constexpr float kMinLogDecay = -60.0f;
constexpr int64_t kMaxWeights = kStateChunk + 8;   // of the ancestors and the state, padded to whole vectors

// The rows of the chunk that a row depends on, in order of position.
struct Ancestors {
    const float* keys[kStateChunk];
    const float* updates[kStateChunk];
    float log_decay_sums[kMaxWeights] = {0};   // the one after the last is 0, that of the state
    int64_t count = 0;

    FOREWORD_INLINE void add(const float* key, const float* update, float log_decay_sum) {
        keys[count] = key;
        updates[count] = update;
        log_decay_sums[count++] = log_decay_sum;
    }
    FOREWORD_INLINE void add_all(const ChunkRows& rows) {
        for (int64_t i = 0; i < rows.count; ++i) add(rows.keys + i * rows.key_stride, rows.updates + i * rows.update_stride, rows.log_decay_sums[i]);
    }
    // Computes the decay of ancestor i, weights[i], and of the state, weights[count], up to a row with this log decay sum.
    FOREWORD_INLINE void compute_weights(float row_sum, float (&weights)[kMaxWeights]) const {
        for (int64_t i = 0; i <= count; i += 8) store(weights + i, exponential(sub(set1(row_sum), load(log_decay_sums + i))));
        for (int64_t i = 0; i <= count; ++i) weights[i] = row_sum - log_decay_sums[i] < kMinLogDecay ? 0.0f : weights[i];
    }
};

FOREWORD_INLINE void find_ancestors(const RecurrentTask& task, int64_t row, Ancestors& ancestors) {
    const auto add = [&](int64_t other) {
        ancestors.add(task.keys + other * task.stride, task.updates + other * task.out_stride, task.log_decay_sums[other]);
    };
    ancestors.add_all(task.ring_rows);
    const int64_t committed_ancestors = row < task.committed_rows ? row : task.committed_rows;
    for (int64_t other = 0; other < committed_ancestors; ++other) add(other);
    if (row < task.committed_rows) return;
    const int64_t node = row - task.committed_rows;
    uint64_t mask = static_cast<uint64_t>(task.ancestor_masks[node]) & ~(uint64_t{1} << node);
    for (; mask != 0; mask &= mask - 1) add(task.committed_rows + __builtin_ctzll(mask));
}

// The scores of a row, and pointers to its values and results.
struct RowScores {
    float key_scores[kStateChunk], query_scores[kStateChunk];   // of its key and its query with the ancestors' keys, decayed
    float state_weight;                                         // decay of the state
    float own_score;                                            // of its query with its own key
    float beta;
    const float* values;
    float* update;
    float* out;
};

// Computes 8 * V values of a row's output, and under the delta rule of its update. `row.out` and `row.update` have the
// products of query and key with the state.
template <int V, bool Delta>
FOREWORD_INLINE void mix_row(const RowScores& row, const Ancestors& ancestors, int64_t v) {
    F32x8 predicted[V], out[V];   // predicted: the value that the delta rule corrects
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
        if constexpr (Delta) predicted[i] = mul(load(row.update + v + 8 * i), row.state_weight);
        out[i] = mul(load(row.out + v + 8 * i), row.state_weight);
    }
    for (int64_t k = 0; k < ancestors.count; ++k) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const F32x8 eight = load(ancestors.updates[k] + v + 8 * i);
            if constexpr (Delta) predicted[i] = fma(eight, row.key_scores[k], predicted[i]);
            out[i] = fma(eight, row.query_scores[k], out[i]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
        if constexpr (Delta) store(row.update + v + 8 * i, mul(sub(load(row.values + v + 8 * i), predicted[i]), row.beta));
        store(row.out + v + 8 * i, fma(load(row.update + v + 8 * i), row.own_score, out[i]));
    }
}

template <bool Delta>
void recurrent_rows_as(const RecurrentTask& task) {
    if constexpr (Delta) read_state(task, task.keys, task.updates);
    read_state(task, task.queries, task.out);
    for (int64_t row = 0; row < task.rows; ++row) {
        Ancestors ancestors;
        find_ancestors(task, row, ancestors);
        float weights[kMaxWeights];
        ancestors.compute_weights(task.log_decay_sums[row], weights);
        const float *key = task.keys + row * task.stride, *query = task.queries + row * task.stride;
        RowScores scores;
        for (int64_t i = 0; i < ancestors.count; ++i) {
            if constexpr (Delta) scores.key_scores[i] = dot_product(ancestors.keys[i], key, task.key_dim) * weights[i];
            scores.query_scores[i] = dot_product(ancestors.keys[i], query, task.key_dim) * weights[i];
        }
        scores.state_weight = weights[ancestors.count];
        scores.own_score = dot_product(key, query, task.key_dim);
        scores.beta = Delta ? task.betas[row] : 0.0f;
        scores.values = task.values + row * task.stride;
        scores.update = task.updates + row * task.out_stride;
        scores.out = task.out + row * task.out_stride;
        int64_t v = 0;
        for (; v + 32 <= task.value_dim; v += 32) mix_row<4, Delta>(scores, ancestors, v);
        for (; v < task.value_dim; v += 8) mix_row<1, Delta>(scores, ancestors, v);
    }
}

void recurrent_rows(const RecurrentTask& task) {
    return task.is_delta ? recurrent_rows_as<true>(task) : recurrent_rows_as<false>(task);
}

// Computes 8 * V values of D rows of the next state. `keys` [D, kStateChunk] has the rows' keys times their decays.
template <int D, int V>
FOREWORD_INLINE void update_columns(const float* state, const Ancestors& rows, const float* keys, float state_weight, int64_t value_dim,
                                    float* next, int64_t v) {
    F32x8 sums[D][V];
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) sums[d][i] = mul(load(state + d * value_dim + v + 8 * i), state_weight);
    }
    for (int64_t k = 0; k < rows.count; ++k) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const F32x8 eight = load(rows.updates[k] + v + 8 * i);
#pragma GCC unroll 4
            for (int d = 0; d < D; ++d) sums[d][i] = fma(eight, keys[d * kStateChunk + k], sums[d][i]);
        }
    }
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) store(next + d * value_dim + v + 8 * i, sums[d][i]);
    }
}

template <int D>
FOREWORD_INLINE void update_rows(const float* state, const Ancestors& rows, const float* keys, float state_weight, int64_t value_dim,
                                 float* next) {
    int64_t v = 0;
    for (; v + 16 <= value_dim; v += 16) update_columns<D, 2>(state, rows, keys, state_weight, value_dim, next, v);
    for (; v < value_dim; v += 8) update_columns<D, 1>(state, rows, keys, state_weight, value_dim, next, v);
}

void update_state(const float* state, const ChunkRows* pieces, int64_t count, int64_t key_dim, int64_t value_dim, float* next, float* scratch) {
    Ancestors rows;
    for (int64_t piece = 0; piece < count; ++piece) rows.add_all(pieces[piece]);
    float weights[kMaxWeights];
    rows.compute_weights(rows.log_decay_sums[rows.count - 1], weights);
    for (int64_t k = 0; k < rows.count; ++k) {   // scratch [key dim, kStateChunk]: decayed keys, transposed
        for (int64_t d = 0; d < key_dim; ++d) scratch[d * kStateChunk + k] = rows.keys[k][d] * weights[k];
    }
    const float state_weight = weights[rows.count];
    int64_t d = 0;
    for (; d + 4 <= key_dim; d += 4) {
        update_rows<4>(state + d * value_dim, rows, scratch + d * kStateChunk, state_weight, value_dim, next + d * value_dim);
    }
    for (; d < key_dim; ++d) {
        update_rows<1>(state + d * value_dim, rows, scratch + d * kStateChunk, state_weight, value_dim, next + d * value_dim);
    }
}

}  // namespace
