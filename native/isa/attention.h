// Attention over pages. Each row and head is one ordered reduction over the visible keys in position order, an
// online softmax in tiles of 32 positions; pages, neighbours and threads decide only where keys are read.
#pragma once

#include "../types.h"
#include "softmax_tile.h"

namespace {

using namespace foreword;

template <typename T>
FOREWORD_INLINE T* page_keys(const KvView& kv, int64_t page, int64_t head) {
    return reinterpret_cast<T*>(kv.keys) + (page * kv.kv_heads + head) * kv.padded_dim * kPageSize;
}
template <typename T>
FOREWORD_INLINE T* page_values(const KvView& kv, int64_t page, int64_t head) {
    return reinterpret_cast<T*>(kv.values) + (page * kv.kv_heads + head) * kv.padded_dim * kPageSize;
}

template <typename T>
void store_row(const KvView& kv, int64_t slot, int64_t head, const float* key, const float* value) {
    const int64_t page = slot / kPageSize, offset = slot % kPageSize;
    T* keys = page_keys<T>(kv, page, head) + offset;
    T* values = page_values<T>(kv, page, head) + offset * kv.padded_dim;
    for (int64_t d = 0; d < kv.head_dim; ++d) {
        keys[d * kPageSize] = rounded<T>(key[d]);
        values[d] = rounded<T>(value[d]);
    }
}

// Positions [begin, begin + 32) of a prefix of `end` rows, where they lie.
template <typename T>
FOREWORD_INLINE Tile<T> prefix_tile(const KvView& kv, const AttentionTask& task, int64_t begin, int64_t end) {
    const int64_t first = begin / kPageSize, second = begin + kPageSize < end ? first + 1 : first;
    const int64_t pages[2] = {task.block_table[first], task.block_table[second]};
    return {{page_keys<T>(kv, pages[0], task.kv_head), page_keys<T>(kv, pages[1], task.kv_head)},
            {page_values<T>(kv, pages[0], task.kv_head), page_values<T>(kv, pages[1], task.kv_head)}};
}

// Copies logical row `logical` of the request to place `lane` of a gathered tile.
template <typename T>
FOREWORD_INLINE void gather_row(const KvView& kv, const AttentionTask& task, int64_t logical, int64_t lane, T* gathered) {
    const int64_t page = task.block_table[logical / kPageSize], offset = logical % kPageSize;
    const T* keys = page_keys<T>(kv, page, task.kv_head) + offset;
    const T* values = page_values<T>(kv, page, task.kv_head) + offset * kv.padded_dim;
    T* half = gathered + lane / kPageSize * 2 * kPageSize * kv.padded_dim;
    T* own_values = half + kPageSize * kv.padded_dim + lane % kPageSize * kv.padded_dim;
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
template <typename T>
FOREWORD_INLINE Tile<T> gathered_tile(const KvView& kv, const AttentionTask& task, const RowView& view, int64_t begin) {
    T* gathered = reinterpret_cast<T*>(task.scratch);
    for (int64_t position = begin; position < view.prefix; ++position) {
        gather_row(kv, task, position, position - begin, gathered);
    }
    uint64_t rest = view.rest;
    for (int64_t position = view.prefix; rest != 0 && position < begin + kKeyTile; ++position, rest &= rest - 1) {
        if (position >= begin) gather_row(kv, task, view.base + __builtin_ctzll(rest), position - begin, gathered);
    }
    const int64_t page = kPageSize * kv.padded_dim;
    return {{gathered, gathered + 2 * page}, {gathered + page, gathered + 3 * page}};
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
            state.stats[0] = task.sinks ? task.sinks[head] : -3.0e38f;
            state.stats[1] = task.sinks ? 1.0f : 0.0f;
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

// Rows of a task that see the same positions of a tile.
struct Company {
    int64_t rows[kAttentionRows];
    int64_t size;
};

template <int Q, typename T>
FOREWORD_INLINE void absorb_queries(const KvView& kv, const Tile<T>& tile, const Tile<T>* next, const Span& span,
                                    const State (&states)[Q], float* scores) {
    if (next) {
        absorb_tile<Q, true>(kv, tile, *next, span, states, scores);
    } else {
        absorb_tile<Q, false>(kv, tile, tile, span, states, scores);
    }
}

// One tile for all heads of some rows, in groups of nearly equal size; the first group fetches the next tile, if any.
template <typename T>
void absorb_rows(const KvView& kv, const Tile<T>& tile, const Tile<T>* next, const Span& span, const States& states,
                 const Company& company, float* scores) {
    const int64_t all = company.size * states.heads, groups = (all + kQueryTile - 1) / kQueryTile;
    const auto query = [&](int64_t i) { return states.at(company.rows[i / states.heads], i % states.heads); };
    int64_t first = 0;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t size = (all - first + groups - group - 1) / (groups - group);
        switch (size) {
            case 1: absorb_queries<1>(kv, tile, next, span, {query(first)}, scores); break;
            case 2: absorb_queries<2>(kv, tile, next, span, {query(first), query(first + 1)}, scores); break;
            case 3: absorb_queries<3>(kv, tile, next, span, {query(first), query(first + 1), query(first + 2)}, scores); break;
            default:
                absorb_queries<4>(kv, tile, next, span,
                                  {query(first), query(first + 1), query(first + 2), query(first + 3)}, scores);
        }
        next = nullptr;
        first += size;
    }
}

// Tile by tile, while its pages are in the cache. Rows that see a whole tile where it lies meet it together.
template <typename T>
void attend(const KvView& kv, const AttentionTask& task) {
    float* scores = task.scratch + 2 * kKeyTile * kv.padded_dim;
    const States states{scores + kQueryTile * kKeyTile, kv.padded_dim, task.head_end - task.head_begin};
    const int64_t rows = task.row_end - task.row_begin;
    RowView views[kAttentionRows];
    int64_t firsts[kAttentionRows];    // what each row sees begins here
    int64_t visible = 0, prefix = 0;   // the most of any row
    int64_t earliest = INT64_MAX;
    for (int64_t row = 0; row < rows; ++row) {
        views[row] = row_view(task, task.row_begin + row);
        visible = views[row].visible > visible ? views[row].visible : visible;
        prefix = views[row].prefix > prefix ? views[row].prefix : prefix;
        const int64_t newest = task.window > 0 ? views[row].visible - task.window : 0;
        firsts[row] = newest > task.first ? newest : task.first;
        earliest = firsts[row] < earliest ? firsts[row] : earliest;
    }
    begin_states(kv, task, states);
    for (int64_t begin = earliest / kKeyTile * kKeyTile; begin < visible; begin += kKeyTile) {
        const int64_t end = begin + kKeyTile;
        // Rows without a window begin together; with one, each by itself until a whole tile is in its window.
        const auto together = [&](int64_t row) {
            return views[row].prefix >= end && (task.window == 0 || firsts[row] <= begin);
        };
        Tile<T> next{};
        if (prefix > end) next = prefix_tile<T>(kv, task, end, prefix);
        const Tile<T>* fetched = prefix > end ? &next : nullptr;
        Company whole{{}, 0};
        for (int64_t row = 0; row < rows; ++row) {
            if (together(row)) whole.rows[whole.size++] = row;
        }
        if (whole.size > 0) {
            const int64_t hidden = task.window == 0 && task.first > begin ? task.first - begin : 0;
            absorb_rows(kv, prefix_tile<T>(kv, task, begin, end), fetched, {hidden, kKeyTile, task.softcap}, states, whole, scores);
        }
        for (int64_t row = 0; row < rows; ++row) {
            const RowView& view = views[row];
            if (together(row) || view.visible <= begin || firsts[row] >= end) continue;
            const int64_t hidden = firsts[row] > begin ? firsts[row] - begin : 0;
            const int64_t count = view.visible < end ? view.visible - begin : kKeyTile;
            const Tile<T> tile = view.prefix < begin + count ? gathered_tile<T>(kv, task, view, begin)
                                                             : prefix_tile<T>(kv, task, begin, begin + count);
            absorb_rows<T>(kv, tile, nullptr, {hidden, count, task.softcap}, states, {{row}, 1}, scores);
        }
    }
    finish_states(kv, task, states);
}

void store_kv(const KvView& kv, int64_t slot, int64_t head, const float* key, const float* value) {
    const auto store = kv.number == KvNumber::BFloat16 ? store_row<BFloat> : store_row<float>;
    store(kv, slot, head, key, value);
}

void attention(const KvView& kv, const AttentionTask& task) {
    kv.number == KvNumber::BFloat16 ? attend<BFloat>(kv, task) : attend<float>(kv, task);
}

}  // namespace
