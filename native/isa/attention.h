// Attention over pages. Each row and head is one ordered reduction over the visible keys in position order, an
// online softmax in tiles of 32 positions; pages, neighbours and threads decide only where keys are read.
#pragma once

#include "../types.h"
#include "activations.h"

namespace {

using namespace foreword;

FOREWORD_INLINE float* page_keys(const KvView& kv, int64_t page, int64_t head) {
    return kv.keys + (page * kv.kv_heads + head) * kv.padded_dim * kPageSize;
}
FOREWORD_INLINE float* page_values(const KvView& kv, int64_t page, int64_t head) {
    return kv.values + (page * kv.kv_heads + head) * kv.padded_dim * kPageSize;
}

void store_kv(const KvView& kv, int64_t slot, int64_t head, const float* key, const float* value) {
    const int64_t page = slot / kPageSize, offset = slot % kPageSize;
    float* keys = page_keys(kv, page, head) + offset;
    float* values = page_values(kv, page, head) + offset * kv.padded_dim;
    for (int64_t d = 0; d < kv.head_dim; ++d) {
        keys[d * kPageSize] = key[d];
        values[d] = value[d];
    }
}

// The 32 positions of a tile: two pages, each with keys [padded dim, 16] and values [16, padded dim].
struct Tile {
    const float* keys[2];
    const float* values[2];
};

// Positions [begin, begin + 32) of a prefix of `end` rows, where they lie.
FOREWORD_INLINE Tile prefix_tile(const KvView& kv, const AttentionTask& task, int64_t begin, int64_t end) {
    const int64_t first = begin / kPageSize, second = begin + kPageSize < end ? first + 1 : first;
    const int64_t pages[2] = {task.block_table[first], task.block_table[second]};
    return {{page_keys(kv, pages[0], task.kv_head), page_keys(kv, pages[1], task.kv_head)},
            {page_values(kv, pages[0], task.kv_head), page_values(kv, pages[1], task.kv_head)}};
}

// Copies logical row `logical` of the request to place `lane` of a gathered tile.
FOREWORD_INLINE void gather_row(const KvView& kv, const AttentionTask& task, int64_t logical, int64_t lane, float* gathered) {
    const int64_t page = task.block_table[logical / kPageSize], offset = logical % kPageSize;
    const float* keys = page_keys(kv, page, task.kv_head) + offset;
    const float* values = page_values(kv, page, task.kv_head) + offset * kv.padded_dim;
    float* half = gathered + lane / kPageSize * 2 * kPageSize * kv.padded_dim;
    float* own_values = half + kPageSize * kv.padded_dim + lane % kPageSize * kv.padded_dim;
    for (int64_t d = 0; d < kv.padded_dim; ++d) {
        half[d * kPageSize + lane % kPageSize] = keys[d * kPageSize];
        own_values[d] = values[d];
    }
}

// What a row sees: its first `prefix` logical rows, then those with a bit in `rest` (bit i is row `base + i`).
// Ancestors that follow the prefix without a gap (a chain) count as part of it.
struct RowView {
    int64_t prefix, base, visible;
    uint64_t rest;
};

FOREWORD_INLINE RowView row_view(const AttentionTask& task, int64_t row) {
    const int64_t base = task.prefix_lens[row];
    const uint64_t mask = static_cast<uint64_t>(task.masks[row]);
    const int64_t gapless = ~mask == 0 ? 64 : __builtin_ctzll(~mask);
    const uint64_t rest = gapless == 64 ? 0 : mask >> gapless << gapless;
    return {base + gapless, base, base + __builtin_popcountll(mask), rest};
}

// The same positions for a row with ancestors behind a gap, gathered in position order.
FOREWORD_INLINE Tile gathered_tile(const KvView& kv, const AttentionTask& task, const RowView& view, int64_t begin) {
    for (int64_t position = begin; position < view.prefix; ++position) {
        gather_row(kv, task, position, position - begin, task.scratch);
    }
    uint64_t rest = view.rest;
    for (int64_t position = view.prefix; rest != 0 && position < begin + kKeyTile; ++position, rest &= rest - 1) {
        if (position >= begin) gather_row(kv, task, view.base + __builtin_ctzll(rest), position - begin, task.scratch);
    }
    const int64_t page = kPageSize * kv.padded_dim;
    return {{task.scratch, task.scratch + 2 * page}, {task.scratch + page, task.scratch + 3 * page}};
}

// Running softmax of one row and head.
struct State {
    float* query;   // [padded dim], scaled
    float* out;     // [padded dim]
    float* stats;   // largest score, sum of weights
};

// Scores of Q queries against a tile of keys. Each is a sum over the head's dimensions in their order.
template <int Q, bool Fetch>
FOREWORD_INLINE void score_tile(const State (&states)[Q], const Tile& tile, const Tile& next, int64_t head_dim,
                                float* scores) {
    const float *first = tile.keys[0], *second = tile.keys[1];
    F32x8 sums[Q][4];
#pragma GCC unroll 2
    for (int s = 0; s < Q; ++s) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[s][i] = set1(0.0f);
    }
    for (int64_t d = 0; d < head_dim; ++d) {
        if constexpr (Fetch) {
            __builtin_prefetch(next.keys[0] + d * kPageSize);
            __builtin_prefetch(next.keys[1] + d * kPageSize);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const F32x8 eight = load((i < 2 ? first : second) + d * kPageSize + 8 * (i % 2));
#pragma GCC unroll 2
            for (int s = 0; s < Q; ++s) sums[s][i] = fma(eight, states[s].query[d], sums[s][i]);
        }
    }
#pragma GCC unroll 2
    for (int s = 0; s < Q; ++s) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) store(scores + s * kKeyTile + 8 * i, sums[s][i]);
    }
}

// Turns `count` scores into weights, updates the running maximum and sum, returns the factor for what came before.
FOREWORD_INLINE float weigh_scores(float* scores, int64_t count, const State& state) {
    for (int64_t i = count; i < kKeyTile; ++i) scores[i] = -__builtin_inff();
    const F32x8 largest = max(max(load(scores), load(scores + 8)), max(load(scores + 16), load(scores + 24)));
    const float before = state.stats[0], highest = max_lanes(largest);
    const float now = highest > before ? highest : before;
    for (int64_t i = 0; i < kKeyTile; i += 8) store(scores + i, exponential(sub(load(scores + i), set1(now))));
    for (int64_t i = count; i < kKeyTile; ++i) scores[i] = 0.0f;
    const F32x8 total = add(add(load(scores), load(scores + 8)), add(load(scores + 16), load(scores + 24)));
    float factor[8];
    store(factor, exponential(set1(before - now)));
    state.stats[0] = now;
    state.stats[1] = state.stats[1] * factor[0] + sum_lanes(total);
    return factor[0];
}

// Eight times V dimensions of Q outputs: rescaled, then the tile's values added in their order.
template <int Q, int V, bool Fetch>
FOREWORD_INLINE void mix_values(const State (&states)[Q], const float (&factors)[Q], const Tile& tile, const Tile& next,
                                int64_t stride, const float* weights, int64_t count, int64_t d) {
    F32x8 sums[Q][V];
#pragma GCC unroll 2
    for (int s = 0; s < Q; ++s) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) sums[s][i] = mul(load(states[s].out + d + 8 * i), factors[s]);
    }
    for (int64_t k = 0; k < count; ++k) {
        const int64_t place = k % kPageSize * stride + d;
        const float* value = tile.values[k / kPageSize] + place;
        if constexpr (Fetch) {
            __builtin_prefetch(next.values[k / kPageSize] + place);
            __builtin_prefetch(next.values[k / kPageSize] + place + 16);
        }
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const F32x8 eight = load(value + 8 * i);
#pragma GCC unroll 2
            for (int s = 0; s < Q; ++s) sums[s][i] = fma(eight, weights[s * kKeyTile + k], sums[s][i]);
        }
    }
#pragma GCC unroll 2
    for (int s = 0; s < Q; ++s) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) store(states[s].out + d + 8 * i, sums[s][i]);
    }
}

// Takes `count` keys of a tile into the softmax of Q heads of one row; with Fetch the next tile is fetched meanwhile.
template <int Q, bool Fetch>
void absorb_tile(const KvView& kv, const Tile& tile, const Tile& next, int64_t count, const State (&states)[Q], float* scores) {
    score_tile<Q, Fetch>(states, tile, next, kv.head_dim, scores);
    float factors[Q];
    for (int s = 0; s < Q; ++s) factors[s] = weigh_scores(scores + s * kKeyTile, count, states[s]);
    int64_t d = 0;
    for (; d + 32 <= kv.padded_dim; d += 32) {
        mix_values<Q, 4, Fetch>(states, factors, tile, next, kv.padded_dim, scores, count, d);
    }
    for (; d < kv.padded_dim; d += 8) mix_values<Q, 1, Fetch>(states, factors, tile, next, kv.padded_dim, scores, count, d);
}

// The states of all rows and heads of a task, laid out in its scratch.
struct States {
    float* base;
    int64_t padded_dim;
    int64_t heads;
    FOREWORD_INLINE State at(int64_t row, int64_t head) const {
        float* p = base + (row * heads + head) * (2 * padded_dim + 8);
        return {p, p + padded_dim, p + 2 * padded_dim};
    }
};

void begin_states(const KvView& kv, const AttentionTask& task, const States& states) {
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
        for (int64_t head = task.head_begin; head < task.head_end; ++head) {
            const State state = states.at(row - task.row_begin, head - task.head_begin);
            const float* query = task.queries + row * task.query_stride + head * kv.head_dim;
            for (int64_t d = 0; d < kv.padded_dim; d += 8) {
                store(state.query + d, mul(load_part(query + d, kv.head_dim - d), task.scale));
                store(state.out + d, set1(0.0f));
            }
            state.stats[0] = -3.0e38f;
            state.stats[1] = 0.0f;
        }
    }
}

void finish_states(const KvView& kv, const AttentionTask& task, const States& states) {
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
        for (int64_t head = task.head_begin; head < task.head_end; ++head) {
            const State state = states.at(row - task.row_begin, head - task.head_begin);
            float* out = task.out + row * task.out_stride + head * kv.head_dim;
            const F32x8 total = set1(state.stats[1]);
            for (int64_t d = 0; d < kv.head_dim; d += 8) {
                store_part(out + d, div(load(state.out + d), total), kv.head_dim - d);
            }
        }
    }
}

// One tile for all heads of a row.
template <bool Fetch>
FOREWORD_INLINE void absorb_row(const KvView& kv, const Tile& tile, const Tile& next, int64_t count, const States& states,
                                int64_t row, float* scores) {
    int64_t head = 0;
    for (; head + 2 <= states.heads; head += 2) {
        const State pair[2] = {states.at(row, head), states.at(row, head + 1)};
        if (head == 0) {
            absorb_tile<2, Fetch>(kv, tile, next, count, pair, scores);
        } else {
            absorb_tile<2, false>(kv, tile, next, count, pair, scores);
        }
    }
    if (head < states.heads) {
        const State last[1] = {states.at(row, head)};
        if (head == 0) {
            absorb_tile<1, Fetch>(kv, tile, next, count, last, scores);
        } else {
            absorb_tile<1, false>(kv, tile, next, count, last, scores);
        }
    }
}

// Tile by tile, while its pages are in the cache; the first row to see a tile fetches the next.
void attention(const KvView& kv, const AttentionTask& task) {
    float* scores = task.scratch + 2 * kKeyTile * kv.padded_dim;
    const States states{scores + 2 * kKeyTile, kv.padded_dim, task.head_end - task.head_begin};
    int64_t longest = 0;
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
        const int64_t visible = row_view(task, row).visible;
        longest = visible > longest ? visible : longest;
    }
    begin_states(kv, task, states);
    for (int64_t begin = 0; begin < longest; begin += kKeyTile) {
        bool fetched = false;
        for (int64_t row = task.row_begin; row < task.row_end; ++row) {
            const RowView view = row_view(task, row);
            if (view.visible <= begin) continue;
            const int64_t count = view.visible - begin < kKeyTile ? view.visible - begin : kKeyTile;
            const Tile tile = view.prefix < begin + count ? gathered_tile(kv, task, view, begin)
                                                          : prefix_tile(kv, task, begin, begin + count);
            if (!fetched && view.prefix > begin + kKeyTile) {
                const Tile next = prefix_tile(kv, task, begin + kKeyTile, view.prefix);
                absorb_row<true>(kv, tile, next, count, states, row - task.row_begin, scores);
                fetched = true;
            } else {
                absorb_row<false>(kv, tile, tile, count, states, row - task.row_begin, scores);
            }
        }
    }
    finish_states(kv, task, states);
}

}  // namespace
