// Recurrent layers. A row is one ordered sum over the state and its ancestors in the chunk, so that its bits do not depend
// on how many rows are computed beside it, or on which of its ancestors were known before.
#pragma once

#include "../types.h"
#include "activations.h"

namespace {

using namespace foreword;

void convolve(const float* const* inputs, const float* weights, const float* bias, int64_t kernel, bool with_silu, int64_t n,
              float* out) {
    for (int64_t i = 0; i < n; i += 8) {
        const int64_t count = n - i;
        F32x8 sum = mul(load_part(inputs[0] + i, count), load_part(weights + i, count));
        for (int64_t j = 1; j < kernel; ++j) sum = fma(load_part(inputs[j] + i, count), load_part(weights + j * n + i, count), sum);
        if (bias) sum = add(sum, load_part(bias + i, count));
        store_part(out + i, with_silu ? silu(sum) : sum, count);
    }
}

// 8 * V values of what Q rows find in a state: sums over its rows in their order.
template <int Q, int V>
FOREWORD_INLINE void read_columns(const float* state, int64_t key_dim, int64_t value_dim, const float* asked, int64_t stride,
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
            for (int q = 0; q < Q; ++q) sums[q][i] = fma(eight, asked[q * stride + d], sums[q][i]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) store(out + q * out_stride + 8 * i, sums[q][i]);
    }
}

template <int Q>
FOREWORD_INLINE void read_rows(const RecurrentTask& task, const float* asked, float* out) {
    constexpr int V = Q > 2 ? 2 : 4;   // all sums stay in registers
    int64_t v = 0;
    for (; v + 8 * V <= task.value_dim; v += 8 * V) {
        read_columns<Q, V>(task.state + v, task.key_dim, task.value_dim, asked, task.stride, out + v, task.out_stride);
    }
    for (; v < task.value_dim; v += 8) {
        read_columns<Q, 1>(task.state + v, task.key_dim, task.value_dim, asked, task.stride, out + v, task.out_stride);
    }
}

// What all rows find in the state.
FOREWORD_INLINE void read_state(const RecurrentTask& task, const float* asked, float* out) {
    int64_t row = 0;
    for (; row + 4 <= task.rows; row += 4) read_rows<4>(task, asked + row * task.stride, out + row * task.out_stride);
    for (; row < task.rows; ++row) read_rows<1>(task, asked + row * task.stride, out + row * task.out_stride);
}

FOREWORD_INLINE float inner(const float* a, const float* b, int64_t n) {
    F32x8 sum = set1(0.0f);
    for (int64_t i = 0; i < n; i += 8) sum = fma(load_part(a + i, n - i), load_part(b + i, n - i), sum);
    return sum_lanes(sum);
}

// Log decay below which nothing is left. Products with less would be denormal, which CPUs compute a hundred times slower.
constexpr float kForgotten = -60.0f;
constexpr int64_t kSpans = kStateChunk + 8;   // ancestors, the state itself, and room for a whole vector

// What a row sees of its chunk, in order of position.
struct Ancestors {
    const float* keys[kStateChunk];
    const float* updates[kStateChunk];
    float decays[kSpans] = {0};
    int64_t count = 0;

    FOREWORD_INLINE void add(const float* key, const float* update, float decay) {
        keys[count] = key;
        updates[count] = update;
        decays[count++] = decay;
    }
    FOREWORD_INLINE void add_all(const ChunkRows& rows) {
        for (int64_t i = 0; i < rows.count; ++i) add(rows.keys + i * rows.key_stride, rows.updates + i * rows.update_stride, rows.decays[i]);
    }
    // weights[i] is what is left of ancestor i at a decay of `now`, weights[count] what is left of the state.
    FOREWORD_INLINE void weigh(float now, float (&weights)[kSpans]) const {
        for (int64_t i = 0; i <= count; i += 8) store(weights + i, exponential(sub(set1(now), load(decays + i))));
        for (int64_t i = 0; i <= count; ++i) weights[i] = now - decays[i] < kForgotten ? 0.0f : weights[i];
    }
};

FOREWORD_INLINE void find_ancestors(const RecurrentTask& task, int64_t row, Ancestors& seen) {
    const auto add = [&](int64_t other) {
        seen.add(task.keys + other * task.stride, task.updates + other * task.out_stride, task.decays[other]);
    };
    seen.add_all(task.known);
    const int64_t before = row < task.committed ? row : task.committed;
    for (int64_t other = 0; other < before; ++other) add(other);
    if (row < task.committed) return;
    const int64_t node = row - task.committed;
    uint64_t mask = static_cast<uint64_t>(task.masks[node]) & ~(uint64_t{1} << node);
    for (; mask != 0; mask &= mask - 1) add(task.committed + __builtin_ctzll(mask));
}

// A row's scores of its ancestors, and where its numbers stand.
struct RowScores {
    float keyed[kStateChunk], asked[kStateChunk];   // by its key and by its query, decayed
    float left;                                     // of the state
    float own;                                      // its query by its own key
    float strength;
    const float* values;
    float* update;
    float* out;
};

// 8 * V values of a row's update, which the delta rule makes, and of what its query finds.
template <int V, bool Delta>
FOREWORD_INLINE void mix_row(const RowScores& row, const Ancestors& seen, int64_t v) {
    F32x8 found[V], read[V];
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
        if constexpr (Delta) found[i] = mul(load(row.update + v + 8 * i), row.left);
        read[i] = mul(load(row.out + v + 8 * i), row.left);
    }
    for (int64_t k = 0; k < seen.count; ++k) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const F32x8 eight = load(seen.updates[k] + v + 8 * i);
            if constexpr (Delta) found[i] = fma(eight, row.keyed[k], found[i]);
            read[i] = fma(eight, row.asked[k], read[i]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
        if constexpr (Delta) store(row.update + v + 8 * i, mul(sub(load(row.values + v + 8 * i), found[i]), row.strength));
        store(row.out + v + 8 * i, fma(load(row.update + v + 8 * i), row.own, read[i]));
    }
}

template <bool Delta>
void recur_rows(const RecurrentTask& task) {
    if constexpr (Delta) read_state(task, task.keys, task.updates);
    read_state(task, task.queries, task.out);
    for (int64_t row = 0; row < task.rows; ++row) {
        Ancestors seen;
        find_ancestors(task, row, seen);
        float weights[kSpans];
        seen.weigh(task.decays[row], weights);
        const float *key = task.keys + row * task.stride, *query = task.queries + row * task.stride;
        RowScores scores;
        for (int64_t i = 0; i < seen.count; ++i) {
            if constexpr (Delta) scores.keyed[i] = inner(seen.keys[i], key, task.key_dim) * weights[i];
            scores.asked[i] = inner(seen.keys[i], query, task.key_dim) * weights[i];
        }
        scores.left = weights[seen.count];
        scores.own = inner(key, query, task.key_dim);
        scores.strength = Delta ? task.strength[row] : 0.0f;
        scores.values = task.values + row * task.stride;
        scores.update = task.updates + row * task.out_stride;
        scores.out = task.out + row * task.out_stride;
        int64_t v = 0;
        for (; v + 32 <= task.value_dim; v += 32) mix_row<4, Delta>(scores, seen, v);
        for (; v < task.value_dim; v += 8) mix_row<1, Delta>(scores, seen, v);
    }
}

void recur(const RecurrentTask& task) {
    return task.is_delta ? recur_rows<true>(task) : recur_rows<false>(task);
}

// 8 * V values of D rows of a state.
template <int D, int V>
FOREWORD_INLINE void fold_block(const float* state, const Ancestors& rows, const float* weighed, float left, int64_t value_dim, float* into,
                                int64_t v) {
    F32x8 sums[D][V];
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) sums[d][i] = mul(load(state + d * value_dim + v + 8 * i), left);
    }
    for (int64_t k = 0; k < rows.count; ++k) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const F32x8 eight = load(rows.updates[k] + v + 8 * i);
#pragma GCC unroll 4
            for (int d = 0; d < D; ++d) sums[d][i] = fma(eight, weighed[d * kStateChunk + k], sums[d][i]);
        }
    }
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) store(into + d * value_dim + v + 8 * i, sums[d][i]);
    }
}

template <int D>
FOREWORD_INLINE void fold_rows(const float* state, const Ancestors& rows, const float* weighed, float left, int64_t value_dim, float* into) {
    int64_t v = 0;
    for (; v + 16 <= value_dim; v += 16) fold_block<D, 2>(state, rows, weighed, left, value_dim, into, v);
    for (; v < value_dim; v += 8) fold_block<D, 1>(state, rows, weighed, left, value_dim, into, v);
}

void fold(const float* state, const ChunkRows* parts, int64_t count, int64_t key_dim, int64_t value_dim, float* into, float* scratch) {
    Ancestors rows;
    for (int64_t part = 0; part < count; ++part) rows.add_all(parts[part]);
    float weights[kSpans];
    rows.weigh(rows.decays[rows.count - 1], weights);
    for (int64_t k = 0; k < rows.count; ++k) {   // [key dim, rows]
        for (int64_t d = 0; d < key_dim; ++d) scratch[d * kStateChunk + k] = rows.keys[k][d] * weights[k];
    }
    const float left = weights[rows.count];
    int64_t d = 0;
    for (; d + 4 <= key_dim; d += 4) fold_rows<4>(state + d * value_dim, rows, scratch + d * kStateChunk, left, value_dim, into + d * value_dim);
    for (; d < key_dim; ++d) fold_rows<1>(state + d * value_dim, rows, scratch + d * kStateChunk, left, value_dim, into + d * value_dim);
}

}  // namespace
