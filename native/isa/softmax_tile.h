// One step of an online softmax: adds a tile of keys and values to the sums of a few queries. The result of a query does
// not depend on the other queries.
#pragma once

#include "../types.h"
#include "activations.h"

namespace {

using namespace foreword;

template <typename T>
constexpr KvDtype kDtypeOf = KvDtype::Float32;
template <>
constexpr KvDtype kDtypeOf<BFloat> = KvDtype::BFloat16;
template <>
constexpr KvDtype kDtypeOf<int8_t> = KvDtype::Int8;
template <typename T>
constexpr bool kIsScaled = kv_scale_bytes(kDtypeOf<T>) > 0;

// Numbers that fill as many bytes as the keys or values of one head in a page.
template <typename T>
constexpr int64_t block_numbers(int64_t padded_dim) {
    return kv_block_bytes(kDtypeOf<T>, padded_dim) / static_cast<int64_t>(sizeof(T));
}
// The scales of the rows in a block of keys or values, if they have scales.
template <typename T>
FOREWORD_INLINE float* scales_of(T* block, int64_t padded_dim) {
    return reinterpret_cast<float*>(block + kPageSize * padded_dim);
}
template <typename T>
FOREWORD_INLINE const float* scales_of(const T* block, int64_t padded_dim) {
    return reinterpret_cast<const float*>(block + kPageSize * padded_dim);
}
FOREWORD_INLINE F32x8 load(const int8_t* levels) { return load_int8(reinterpret_cast<const uint8_t*>(levels)); }

// The 32 positions of a tile: two pages, each with keys [padded dim, 16] and values [16, padded dim].
template <typename T>
struct Tile {
    const T* keys[2];
    const T* values[2];   // null in a tile of latent rows as it is stored
};

// The running softmax of one row and head.
struct SoftmaxState {
    float* query;   // [padded dim], scaled
    float* out;     // [padded dim], weighted sum of values
    float* stats;   // [2], largest score and sum of weights
};

// Vectors of scores per query that are summed together: enough to keep the multipliers busy, few enough for the registers.
template <int Q>
constexpr int kScoreVectors = Q > 2 ? 2 : 4;

// Vectors of values per query that are summed together: with more of them, weights are read less often.
template <int Q>
constexpr int kValueVectors = Q > 3 ? 2 : 4;

// Computes the scores of Q queries with a tile of keys. Each score is a sum over the head's dimensions in order. With Fetch,
// the keys of the next tile are prefetched.
template <int Q, bool Fetch, typename T>
FOREWORD_INLINE void score_tile(const SoftmaxState (&states)[Q], const Tile<T>& tile, const Tile<T>& next, int64_t head_dim,
                                float* scores) {
    constexpr int S = kScoreVectors<Q>;
#pragma GCC unroll 2
    for (int part = 0; part < 4 / S; ++part) {
        const T* keys[2] = {tile.keys[part], tile.keys[1]};
        F32x8 sums[Q][S];
#pragma GCC unroll 4
        for (int s = 0; s < Q; ++s) {
#pragma GCC unroll 4
            for (int i = 0; i < S; ++i) sums[s][i] = set1(0.0f);
        }
#pragma GCC unroll 4
        for (int64_t d = 0; d < head_dim; ++d) {
            if (Fetch && d * kPageSize * static_cast<int64_t>(sizeof(T)) % kCacheLine == 0) {
                __builtin_prefetch(next.keys[part] + d * kPageSize);
                if constexpr (S == 4) __builtin_prefetch(next.keys[1] + d * kPageSize);
            }
#pragma GCC unroll 4
            for (int i = 0; i < S; ++i) {
                const F32x8 eight = load(keys[i / 2] + d * kPageSize + 8 * (i % 2));
#pragma GCC unroll 4
                for (int s = 0; s < Q; ++s) sums[s][i] = fma(eight, states[s].query[d], sums[s][i]);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < S; ++i) {
            F32x8 scales = set1(1.0f);   // of eight keys
            if constexpr (kIsScaled<T>) scales = load(scales_of(keys[i / 2], padded_dim_of(head_dim)) + 8 * (i % 2));
#pragma GCC unroll 4
            for (int s = 0; s < Q; ++s) {
                if constexpr (kIsScaled<T>) sums[s][i] = mul(sums[s][i], scales);
                store(scores + s * kKeyTile + part * kPageSize + 8 * i, sums[s][i]);
            }
        }
    }
}

// The visible positions [begin, end) of a tile, and the softcap of their scores; 0: none.
struct VisibleSpan {
    int64_t begin, end;
    float softcap;
    bool is_whole() const { return begin == 0 && end == kKeyTile; }
};

// Replaces the scores of Q queries by weights, and updates `stats`. The sums of earlier tiles must be multiplied with `factors`.
// Each step is computed for all queries before the next one, because a step waits for the results of the step before.
template <int Q>
FOREWORD_INLINE void weigh_tile(float* scores, const VisibleSpan& span, const SoftmaxState (&states)[Q], float (&factors)[8]) {
    float old_max[8] = {0}, new_max[8] = {0};
#pragma GCC unroll 4
    for (int s = 0; s < Q; ++s) {
        float* row = scores + s * kKeyTile;
        for (int64_t i = 0; i < span.begin; ++i) row[i] = -__builtin_inff();
        for (int64_t i = span.end; i < kKeyTile; ++i) row[i] = -__builtin_inff();
        const F32x8 largest = max(max(load(row), load(row + 8)), max(load(row + 16), load(row + 24)));
        const float highest = max_lanes(largest);
        old_max[s] = states[s].stats[0];
        new_max[s] = highest > old_max[s] ? highest : old_max[s];
    }
    store(factors, exponential(sub(load(old_max), load(new_max))));
#pragma GCC unroll 4
    for (int s = 0; s < Q; ++s) {
        float* row = scores + s * kKeyTile;
        F32x8 weights[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            weights[i] = exponential(sub(load(row + 8 * i), set1(new_max[s])));
            store(row + 8 * i, weights[i]);
        }
        if (!span.is_whole()) {
            for (int64_t i = 0; i < span.begin; ++i) row[i] = 0.0f;
            for (int64_t i = span.end; i < kKeyTile; ++i) row[i] = 0.0f;
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) weights[i] = load(row + 8 * i);
        }
        const F32x8 total = add(add(weights[0], weights[1]), add(weights[2], weights[3]));
        states[s].stats[0] = new_max[s];
        states[s].stats[1] = states[s].stats[1] * factors[s] + sum_lanes(total);
    }
}

// Multiplies the weights of Q queries with the scales of the values.
template <int Q, typename T>
FOREWORD_INLINE void scale_weights(float* weights, const Tile<T>& tile, int64_t value_dim) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const F32x8 scales = load(scales_of(tile.values[i / 2], value_dim) + 8 * (i % 2));
#pragma GCC unroll 4
        for (int s = 0; s < Q; ++s) store(weights + s * kKeyTile + 8 * i, mul(load(weights + s * kKeyTile + 8 * i), scales));
    }
}

// Adds `count` values of a page, times their weights, to 8 * V dimensions of Q outputs.
template <int Q, int V, bool Fetch, typename T>
FOREWORD_INLINE void mix_page(F32x8 (&sums)[Q][V], const T* value, const T* next, int64_t stride,
                              const float* weights, int64_t count) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < count; ++k) {
        if constexpr (Fetch) {
            __builtin_prefetch(next + k * stride);
            if constexpr (8 * V * sizeof(T) > kCacheLine) __builtin_prefetch(next + k * stride + 16);
        }
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const F32x8 eight = load(value + k * stride + 8 * i);
#pragma GCC unroll 4
            for (int s = 0; s < Q; ++s) sums[s][i] = fma(eight, weights[s * kKeyTile + k], sums[s][i]);
        }
    }
}

// Multiplies 8 * V dimensions of Q outputs with the factors, then adds the values of the tile in order of position.
template <int Q, int V, bool Fetch, typename T>
FOREWORD_INLINE void mix_values(const SoftmaxState (&states)[Q], const float (&factors)[8], const Tile<T>& tile, const Tile<T>& next,
                                int64_t stride, const float* weights, const VisibleSpan& span, int64_t d) {
    F32x8 sums[Q][V];
#pragma GCC unroll 4
    for (int s = 0; s < Q; ++s) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) sums[s][i] = mul(load(states[s].out + d + 8 * i), factors[s]);
    }
    for (int64_t page = 0; page * kPageSize < span.end; ++page) {
        const int64_t first = page * kPageSize, skipped = span.begin > first ? span.begin - first : 0;
        const T *value = tile.values[page] + d, *fetched = next.values[page] + d;
        const float* page_weights = weights + first;
        const int64_t count = span.end - first < kPageSize ? span.end - first : kPageSize;
        if (skipped == 0 && count == kPageSize) {   // the CPU predicts the end of a loop with a fixed count
            mix_page<Q, V, Fetch>(sums, value, fetched, stride, page_weights, kPageSize);
        } else if (skipped < count) {   // hidden positions are skipped, because 0 times a NaN in their memory would be NaN
            mix_page<Q, V, Fetch>(sums, value + skipped * stride, fetched, stride, page_weights + skipped, count - skipped);
        }
    }
#pragma GCC unroll 4
    for (int s = 0; s < Q; ++s) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) store(states[s].out + d + 8 * i, sums[s][i]);
    }
}

// Adds the visible positions of a tile to the softmax of Q queries. With Fetch, the next tile is prefetched.
template <int Q, bool Fetch, typename T>
__attribute__((noinline)) void absorb_tile(const KvView& kv, const Tile<T>& tile, const Tile<T>& next, const VisibleSpan& span,
                                           const SoftmaxState (&states)[Q], float* scores) {
    score_tile<Q, Fetch>(states, tile, next, kv.key_dim, scores);
    if (span.softcap > 0.0f) softcap(scores, span.softcap, Q * kKeyTile);
    float factors[8];
    weigh_tile<Q>(scores, span, states, factors);
    const int64_t dim = kv.padded_value_dim();
    if constexpr (kIsScaled<T>) scale_weights<Q>(scores, tile, dim);
    int64_t d = 0;
    for (; d + 8 * kValueVectors<Q> <= dim; d += 8 * kValueVectors<Q>) {
        mix_values<Q, kValueVectors<Q>, Fetch>(states, factors, tile, next, dim, scores, span, d);
    }
    for (; d < dim; d += 8) mix_values<Q, 1, Fetch>(states, factors, tile, next, dim, scores, span, d);
}

}  // namespace
