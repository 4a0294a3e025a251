// One step of an online softmax: a tile of keys and values taken into the sums of a few queries. What a query gets does
// not depend on the others beside it.
#pragma once

#include "../types.h"
#include "activations.h"

namespace {

using namespace foreword;

// The 32 positions of a tile: two pages, each with keys [padded dim, 16] and values [16, padded dim].
template <typename T>
struct Tile {
    const T* keys[2];
    const T* values[2];
};

constexpr int64_t kCacheLine = 64;

// Running softmax of one row and head.
struct State {
    float* query;   // [padded dim], scaled
    float* out;     // [padded dim]
    float* stats;   // largest score, sum of weights
};

// Vectors per query that are summed up at a time: enough sums to keep the multipliers busy, and all in registers.
template <int Q>
constexpr int kSpan = Q > 2 ? 2 : 4;

// The same of values: with more of a row at a time its weights are read less often.
template <int Q>
constexpr int kMixed = Q > 3 ? 2 : 4;

// Scores of Q queries against a tile of keys. Each is a sum over the head's dimensions in their order.
template <int Q, bool Fetch, typename T>
FOREWORD_INLINE void score_tile(const State (&states)[Q], const Tile<T>& tile, const Tile<T>& next, int64_t head_dim,
                                float* scores) {
    constexpr int S = kSpan<Q>;
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
        for (int s = 0; s < Q; ++s) {
#pragma GCC unroll 4
            for (int i = 0; i < S; ++i) store(scores + s * kKeyTile + part * kPageSize + 8 * i, sums[s][i]);
        }
    }
}

// The places of a tile that are seen, and what their scores are squashed by; 0: nothing.
struct Span {
    int64_t begin, end;
    float softcap;
    bool is_whole() const { return begin == 0 && end == kKeyTile; }
};

// Turns the scores of each of Q queries into weights and updates maxima and sums; `factors` get what stands before
// is to be multiplied with. Each step is done for all queries before the next, as every step waits for the one before.
template <int Q>
FOREWORD_INLINE void weigh_tile(float* scores, const Span& span, const State (&states)[Q], float (&factors)[8]) {
    float before[8] = {0}, now[8] = {0};
#pragma GCC unroll 4
    for (int s = 0; s < Q; ++s) {
        float* own = scores + s * kKeyTile;
        for (int64_t i = 0; i < span.begin; ++i) own[i] = -__builtin_inff();
        for (int64_t i = span.end; i < kKeyTile; ++i) own[i] = -__builtin_inff();
        const F32x8 largest = max(max(load(own), load(own + 8)), max(load(own + 16), load(own + 24)));
        const float highest = max_lanes(largest);
        before[s] = states[s].stats[0];
        now[s] = highest > before[s] ? highest : before[s];
    }
    store(factors, exponential(sub(load(before), load(now))));
#pragma GCC unroll 4
    for (int s = 0; s < Q; ++s) {
        float* own = scores + s * kKeyTile;
        F32x8 weights[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            weights[i] = exponential(sub(load(own + 8 * i), set1(now[s])));
            store(own + 8 * i, weights[i]);
        }
        if (!span.is_whole()) {
            for (int64_t i = 0; i < span.begin; ++i) own[i] = 0.0f;
            for (int64_t i = span.end; i < kKeyTile; ++i) own[i] = 0.0f;
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) weights[i] = load(own + 8 * i);
        }
        const F32x8 total = add(add(weights[0], weights[1]), add(weights[2], weights[3]));
        states[s].stats[0] = now[s];
        states[s].stats[1] = states[s].stats[1] * factors[s] + sum_lanes(total);
    }
}

// Adds `count` values of a page, each with its weights, to eight times V dimensions of Q outputs.
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

// Eight times V dimensions of Q outputs: rescaled, then the tile's values added in their order.
template <int Q, int V, bool Fetch, typename T>
FOREWORD_INLINE void mix_values(const State (&states)[Q], const float (&factors)[8], const Tile<T>& tile, const Tile<T>& next,
                                int64_t stride, const float* weights, const Span& span, int64_t d) {
    F32x8 sums[Q][V];
#pragma GCC unroll 4
    for (int s = 0; s < Q; ++s) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) sums[s][i] = mul(load(states[s].out + d + 8 * i), factors[s]);
    }
    for (int64_t page = 0; page * kPageSize < span.end; ++page) {
        const int64_t first = page * kPageSize, skipped = span.begin > first ? span.begin - first : 0;
        const T *value = tile.values[page] + d, *fetched = next.values[page] + d;
        const float* own = weights + first;
        const int64_t rest = span.end - first < kPageSize ? span.end - first : kPageSize;
        if (skipped == 0 && rest == kPageSize) {   // a fixed number of rounds ends without a wrong guess by the CPU
            mix_page<Q, V, Fetch>(sums, value, fetched, stride, own, kPageSize);
        } else if (skipped < rest) {   // what is not seen may hold no numbers, and 0 times that would be none either
            mix_page<Q, V, Fetch>(sums, value + skipped * stride, fetched, stride, own + skipped, rest - skipped);
        }
    }
#pragma GCC unroll 4
    for (int s = 0; s < Q; ++s) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) store(states[s].out + d + 8 * i, sums[s][i]);
    }
}

// Takes some keys of a tile into the softmax of Q queries; with Fetch the next tile is fetched meanwhile.
template <int Q, bool Fetch, typename T>
__attribute__((noinline)) void absorb_tile(const KvView& kv, const Tile<T>& tile, const Tile<T>& next, const Span& span,
                                           const State (&states)[Q], float* scores) {
    score_tile<Q, Fetch>(states, tile, next, kv.head_dim, scores);
    if (span.softcap > 0.0f) squash(scores, span.softcap, Q * kKeyTile);
    float factors[8];
    weigh_tile<Q>(scores, span, states, factors);
    int64_t d = 0;
    for (; d + 8 * kMixed<Q> <= kv.padded_dim; d += 8 * kMixed<Q>) {
        mix_values<Q, kMixed<Q>, Fetch>(states, factors, tile, next, kv.padded_dim, scores, span, d);
    }
    for (; d < kv.padded_dim; d += 8) mix_values<Q, 1, Fetch>(states, factors, tile, next, kv.padded_dim, scores, span, d);
}

}  // namespace
