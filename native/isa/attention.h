// Attention over pages. Each row and head is one ordered reduction over the visible keys in position order, an
// online softmax in tiles of 32 positions; pages, neighbours and threads decide only where keys are read.
#pragma once

#include "../types.h"
#include "activations.h"

namespace {

using namespace foreword;

FOREWORD_INLINE F32x8 load_element(const float* p) { return load(p); }
FOREWORD_INLINE F32x8 load_element(const uint16_t* p) { return load_half(p); }
FOREWORD_INLINE void store_element(float* p, F32x8 a) { store(p, a); }
FOREWORD_INLINE void store_element(uint16_t* p, F32x8 a) { store_half(p, a); }

// Where the keys and values of one KV head begin in a page.
template <typename E>
FOREWORD_INLINE E* page_keys(const KvView& kv, int64_t page, int64_t head) {
    return static_cast<E*>(kv.keys) + (page * kv.kv_heads + head) * kv.padded_dim * kPageSize;
}
template <typename E>
FOREWORD_INLINE E* page_values(const KvView& kv, int64_t page, int64_t head) {
    return static_cast<E*>(kv.values) + (page * kv.kv_heads + head) * kv.padded_dim * kPageSize;
}

template <typename E>
void store_kv_as(const KvView& kv, int64_t slot, int64_t head, const float* key, const float* value) {
    const int64_t page = slot / kPageSize, offset = slot % kPageSize;
    E* keys = page_keys<E>(kv, page, head) + offset;
    E* values = page_values<E>(kv, page, head) + offset * kv.padded_dim;
    for (int64_t d = 0; d < kv.padded_dim; d += 8) {
        E lanes[8];
        store_element(lanes, load_part(key + d, kv.head_dim - d));
        for (int64_t i = 0; i < 8; ++i) keys[(d + i) * kPageSize] = lanes[i];
        store_element(values + d, load_part(value + d, kv.head_dim - d));
    }
}

void store_kv(const KvView& kv, int64_t slot, int64_t head, const float* key, const float* value) {
    if (kv.half) {
        store_kv_as<uint16_t>(kv, slot, head, key, value);
    } else {
        store_kv_as<float>(kv, slot, head, key, value);
    }
}

// A tile of keys, transposed [padded dim, 32], and of values [32, padded dim], as floats.
struct Tile {
    float* keys;
    float* values;
};

// The page's keys into lanes [lane, lane + 16), of which the first `count` mean something, and their values.
template <typename E>
FOREWORD_INLINE void load_page(const KvView& kv, int64_t page, int64_t head, int64_t lane, int64_t count, const Tile& tile) {
    const E* keys = page_keys<E>(kv, page, head);
    for (int64_t d = 0; d < kv.padded_dim; ++d) {
        store(tile.keys + d * kKeyTile + lane, load_element(keys + d * kPageSize));
        store(tile.keys + d * kKeyTile + lane + 8, load_element(keys + d * kPageSize + 8));
    }
    const E* values = page_values<E>(kv, page, head);
    for (int64_t i = 0; i < count * kv.padded_dim; i += 8) {
        store(tile.values + lane * kv.padded_dim + i, load_element(values + i));
    }
}

// One key and value into lane `lane`.
template <typename E>
FOREWORD_INLINE void load_single(const KvView& kv, int64_t slot, int64_t head, int64_t lane, const Tile& tile) {
    const int64_t page = slot / kPageSize, offset = slot % kPageSize;
    const E* keys = page_keys<E>(kv, page, head) + offset;
    const E* values = page_values<E>(kv, page, head) + offset * kv.padded_dim;
    for (int64_t d = 0; d < kv.padded_dim; d += 8) {
        E column[8];
        float lanes[8];
        for (int64_t i = 0; i < 8; ++i) column[i] = keys[(d + i) * kPageSize];
        store(lanes, load_element(column));
        for (int64_t i = 0; i < 8; ++i) tile.keys[(d + i) * kKeyTile + lane] = lanes[i];
        store(tile.values + lane * kv.padded_dim + d, load_element(values + d));
    }
}

// The tile's part of the prefix: positions [begin, end) with end - begin <= 32.
template <typename E>
void load_prefix(const KvView& kv, const AttentionTask& task, int64_t begin, int64_t end, const Tile& tile) {
    for (int64_t first = begin; first < end; first += kPageSize) {
        const int64_t count = end - first < kPageSize ? end - first : kPageSize;
        load_page<E>(kv, task.block_table[first / kPageSize], task.kv_head, first - begin, count, tile);
    }
}

// Ancestors of a row behind its prefix whose positions fall into [begin, begin + 32).
template <typename E>
void load_ancestors(const KvView& kv, const AttentionTask& task, int64_t row, int64_t begin, const Tile& tile) {
    const int64_t prefix = task.prefix_lens[row];
    uint64_t mask = static_cast<uint64_t>(task.masks[row]);
    for (int64_t position = prefix; mask != 0 && position < begin + kKeyTile; ++position, mask &= mask - 1) {
        if (position < begin) continue;
        const int64_t logical = prefix + __builtin_ctzll(mask);
        const int64_t page = task.block_table[logical / kPageSize];
        load_single<E>(kv, page * kPageSize + logical % kPageSize, task.kv_head, position - begin, tile);
    }
}

// Running softmax of one row and head.
struct State {
    float* query;   // [padded dim], scaled
    float* out;     // [padded dim]
    float* stats;   // largest score, sum of weights
};

FOREWORD_INLINE void score_tile(const float* query, const float* keys, int64_t head_dim, float* scores) {
    F32x8 sums[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
    for (int64_t d = 0; d < head_dim; ++d) {
        const float* column = keys + d * kKeyTile;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[i] = fma(load(column + 8 * i), query[d], sums[i]);
    }
    for (int i = 0; i < 4; ++i) store(scores + 8 * i, sums[i]);
}

template <int Vectors>
FOREWORD_INLINE void mix_values(const float* values, const float* weights, int64_t count, int64_t stride, float rescale, float* out) {
    F32x8 sums[Vectors];
#pragma GCC unroll 8
    for (int i = 0; i < Vectors; ++i) sums[i] = mul(load(out + 8 * i), rescale);
    for (int64_t k = 0; k < count; ++k) {
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i) sums[i] = fma(load(values + k * stride + 8 * i), weights[k], sums[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < Vectors; ++i) store(out + 8 * i, sums[i]);
}

// Takes `count` keys of a tile into a row's softmax.
void absorb_tile(const KvView& kv, const Tile& tile, int64_t count, const State& state, float* scores) {
    score_tile(state.query, tile.keys, kv.head_dim, scores);
    for (int64_t i = count; i < kKeyTile; ++i) scores[i] = -__builtin_inff();
    F32x8 largest = max(max(load(scores), load(scores + 8)), max(load(scores + 16), load(scores + 24)));
    const float before = state.stats[0];
    const float highest = max_lanes(largest);
    const float now = highest > before ? highest : before;
    F32x8 total = set1(0.0f);
    for (int64_t i = 0; i < kKeyTile; i += 8) {
        const F32x8 weights = exponential(sub(load(scores + i), set1(now)));
        store(scores + i, weights);
    }
    for (int64_t i = count; i < kKeyTile; ++i) scores[i] = 0.0f;
    for (int64_t i = 0; i < kKeyTile; i += 8) total = add(total, load(scores + i));
    float factor[8];
    store(factor, exponential(set1(before - now)));
    state.stats[0] = now;
    state.stats[1] = state.stats[1] * factor[0] + sum_lanes(total);
    int64_t d = 0;
    for (; d + 32 <= kv.padded_dim; d += 32) {
        mix_values<4>(tile.values + d, scores, count, kv.padded_dim, factor[0], state.out + d);
    }
    for (; d < kv.padded_dim; d += 8) {
        mix_values<1>(tile.values + d, scores, count, kv.padded_dim, factor[0], state.out + d);
    }
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

FOREWORD_INLINE int64_t visible_keys(const AttentionTask& task, int64_t row) {
    return task.prefix_lens[row] + __builtin_popcountll(static_cast<uint64_t>(task.masks[row]));
}

template <typename E>
void attend(const KvView& kv, const AttentionTask& task) {
    const Tile tile{task.scratch, task.scratch + kKeyTile * kv.padded_dim};
    float* scores = task.scratch + 2 * kKeyTile * kv.padded_dim;
    const States states{scores + kKeyTile, kv.padded_dim, task.head_end - task.head_begin};
    int64_t longest_prefix = 0, longest = 0;
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
        const int64_t prefix = task.prefix_lens[row], visible = visible_keys(task, row);
        longest_prefix = prefix > longest_prefix ? prefix : longest_prefix;
        longest = visible > longest ? visible : longest;
    }
    begin_states(kv, task, states);
    for (int64_t begin = 0; begin < longest; begin += kKeyTile) {
        int64_t loaded = -1;   // end of the prefix part that the tile holds now; -1: another row's ancestors
        for (int64_t row = task.row_begin; row < task.row_end; ++row) {
            const int64_t rest = visible_keys(task, row) - begin;
            if (rest <= 0) continue;
            const int64_t count = rest < kKeyTile ? rest : kKeyTile;
            const int64_t prefix = task.prefix_lens[row];
            const bool own = prefix < begin + count;
            const int64_t shared = own ? prefix : (longest_prefix < begin + kKeyTile ? longest_prefix : begin + kKeyTile);
            if (own || loaded != shared) load_prefix<E>(kv, task, begin, shared, tile);
            loaded = own ? -1 : shared;
            if (own) load_ancestors<E>(kv, task, row, begin, tile);
            for (int64_t head = task.head_begin; head < task.head_end; ++head) {
                absorb_tile(kv, tile, count, states.at(row - task.row_begin, head - task.head_begin), scores);
            }
        }
    }
    finish_states(kv, task, states);
}

void attention(const KvView& kv, const AttentionTask& task) {
    if (kv.half) {
        attend<uint16_t>(kv, task);
    } else {
        attend<float>(kv, task);
    }
}

}  // namespace
