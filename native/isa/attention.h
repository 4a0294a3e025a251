// Attention over pages. The output of a row and head is an online softmax over the visible keys in order of position, in tiles of
// 32 positions. The order is the same whatever the pages, the other rows of the task and the number of threads are.
#pragma once

#include "../types.h"
#include "attention_shares.h"
#include "softmax_tile.h"

namespace {

using namespace foreword;

template <typename T>
FOREWORD_INLINE T* page_keys(const KvView& kv, int64_t page, int64_t head) {
    return reinterpret_cast<T*>(kv.keys + (page * kv.kv_heads + head) * kv_block_bytes(kDtypeOf<T>, kv.padded_key_dim()));
}
template <typename T>
FOREWORD_INLINE T* page_values(const KvView& kv, int64_t page, int64_t head) {
    return reinterpret_cast<T*>(kv.values + (page * kv.kv_heads + head) * kv_block_bytes(kDtypeOf<T>, kv.padded_value_dim()));
}

// Stores the numbers of a key or a value in `out`, at multiples of `stride`.
template <typename T>
void store_numbers(const float* x, int64_t dim, int64_t stride, T* out, float*) {
    for (int64_t d = 0; d < dim; ++d) out[d * stride] = rounded<T>(x[d]);
}

// Stores the numbers rounded to 8 bits with one scale, which is NaN if a number is NaN or infinite.
void store_numbers(const float* x, int64_t dim, int64_t stride, int8_t* out, float* scale) {
    F32x8 largest = set1(0.0f), nan_check = set1(0.0f);
    for (int64_t d = 0; d < dim; d += 8) {
        const F32x8 numbers = load_part(x + d, dim - d);
        largest = max(largest, abs(numbers));
        nan_check = fma(numbers, 0.0f, nan_check);
    }
    const float maximum = max_lanes(largest), inverse = maximum > 0.0f ? 127.0f / maximum : 0.0f;
    for (int64_t d = 0; d < dim; d += 8) {
        int8_t levels[8];
        store_int8(levels, round(mul(load_part(x + d, dim - d), inverse)));
        for (int64_t i = 0; i < 8 && d + i < dim; ++i) out[(d + i) * stride] = levels[i];
    }
    *scale = maximum / 127.0f + sum_lanes(nan_check);
}

template <typename T>
void store_row(const KvView& kv, int64_t slot, int64_t head, const float* key, const float* value) {
    const int64_t page = slot / kPageSize, offset = slot % kPageSize;
    T* keys = page_keys<T>(kv, page, head);
    store_numbers(key, kv.key_dim, kPageSize, keys + offset, scales_of(keys, kv.padded_key_dim()) + offset);
    if (kv.is_latent()) return;
    T* values = page_values<T>(kv, page, head);
    const int64_t dim = kv.padded_value_dim();
    store_numbers(value, kv.value_dim, 1, values + offset * dim, scales_of(values, dim) + offset);
}

// Returns the tile of positions [begin, begin + 32) in the pages. The prefix has `end` rows; a page after it is not read.
template <typename T>
FOREWORD_INLINE Tile<T> prefix_tile(const KvView& kv, const AttentionTask& task, int64_t begin, int64_t end) {
    const int64_t first = begin / kPageSize, second = begin + kPageSize < end ? first + 1 : first;
    const int64_t pages[2] = {task.block_table[first], task.block_table[second]};
    if (kv.is_latent()) return {{page_keys<T>(kv, pages[0], 0), page_keys<T>(kv, pages[1], 0)}, {nullptr, nullptr}};
    return {{page_keys<T>(kv, pages[0], task.kv_head), page_keys<T>(kv, pages[1], task.kv_head)},
            {page_values<T>(kv, pages[0], task.kv_head), page_values<T>(kv, pages[1], task.kv_head)}};
}

// Copies KV row `logical` of the request to position `lane` of a gathered tile.
template <typename T>
FOREWORD_INLINE void gather_row(const KvView& kv, const AttentionTask& task, int64_t logical, int64_t lane, T* gathered) {
    const int64_t page = task.block_table[logical / kPageSize], offset = logical % kPageSize;
    const int64_t key_dim = kv.padded_key_dim(), value_dim = kv.padded_value_dim();
    T* keys = page_keys<T>(kv, page, task.kv_head);
    T *tile_keys = gathered + lane / kPageSize * 2 * block_numbers<T>(key_dim), *tile_values = tile_keys + block_numbers<T>(key_dim);
    lane %= kPageSize;
    for (int64_t d = 0; d < key_dim; ++d) tile_keys[d * kPageSize + lane] = keys[d * kPageSize + offset];
    if constexpr (kIsScaled<T>) scales_of(tile_keys, key_dim)[lane] = scales_of(keys, key_dim)[offset];
    if (kv.is_latent()) return;
    T* values = page_values<T>(kv, page, task.kv_head);
    for (int64_t d = 0; d < value_dim; ++d) tile_values[lane * value_dim + d] = values[offset * value_dim + d];
    if constexpr (kIsScaled<T>) scales_of(tile_values, value_dim)[lane] = scales_of(values, value_dim)[offset];
}

// Expands a tile of latent rows to keys and values in float32.
template <typename T>
Tile<float> expanded_tile(const KvView& kv, const Tile<T>& rows, float* expanded) {
    const int64_t key_dim = kv.padded_key_dim(), value_dim = kv.padded_value_dim(), page_floats = kPageSize * key_dim;
    for (int64_t page = 0; page < 2; ++page) {
        float *keys = expanded + 2 * page * page_floats, *values = keys + page_floats;
        for (int64_t d = 0; d < key_dim; d += 8) {
            for (int64_t lane = 0; lane < kPageSize; lane += 8) {
                F32x8 numbers[8];   // dimensions d + i of eight positions
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) {
                    numbers[i] = load(rows.keys[page] + (d + i) * kPageSize + lane);
                    store(keys + (d + i) * kPageSize + lane, numbers[i]);
                }
                if (d >= value_dim) continue;
                transpose(numbers);
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) store(values + (lane + i) * value_dim + d, numbers[i]);
            }
        }
    }
    return {{expanded, expanded + 2 * page_floats}, {expanded + page_floats, expanded + 3 * page_floats}};
}

// The KV rows of the request that are visible to a row: the first `prefix` rows, which include the ancestors that follow the
// committed rows without a gap (a chain); then the rows base + i for the bits i of `ancestors`.
struct RowView {
    int64_t prefix, base, visible;   // visible: number of all visible rows
    uint64_t ancestors;
};

FOREWORD_INLINE RowView row_view(const AttentionTask& task, int64_t row) {
    const int64_t base = task.prefix_lens[row];
    const uint64_t mask = static_cast<uint64_t>(task.ancestor_masks[row]);
    const int64_t gapless = ~mask == 0 ? 64 : __builtin_ctzll(~mask);
    const uint64_t ancestors = gapless == 64 ? 0 : mask >> gapless << gapless;
    return {base + gapless, base, base + __builtin_popcountll(mask), ancestors};
}

// Returns a copy of the tile that begins at position `begin`, for a row with ancestors after a gap.
template <typename T>
FOREWORD_INLINE Tile<T> gathered_tile(const KvView& kv, const AttentionTask& task, const RowView& view, int64_t begin) {
    T* gathered = reinterpret_cast<T*>(task.scratch);
    for (int64_t position = begin; position < view.prefix; ++position) {
        gather_row(kv, task, position, position - begin, gathered);
    }
    uint64_t ancestors = view.ancestors;
    for (int64_t position = view.prefix; ancestors != 0 && position < begin + kKeyTile; ++position, ancestors &= ancestors - 1) {
        if (position >= begin) gather_row(kv, task, view.base + __builtin_ctzll(ancestors), position - begin, gathered);
    }
    const int64_t page = block_numbers<T>(kv.padded_key_dim());
    return {{gathered, gathered + 2 * page}, {gathered + page, gathered + 3 * page}};
}

// The softmax states of all rows and heads of a task, in its scratch.
struct SoftmaxStates {
    float* base;
    int64_t padded_dim;
    int64_t heads;
    FOREWORD_INLINE SoftmaxState at(int64_t row, int64_t head) const {
        float* p = base + (row * heads + head) * (2 * padded_dim + 8);
        return {p, p + padded_dim, p + 2 * padded_dim};
    }
};

void begin_states(const KvView& kv, const AttentionTask& task, const SoftmaxStates& states) {
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
        for (int64_t head = task.head_begin; head < task.head_end; ++head) {
            const SoftmaxState state = states.at(row - task.row_begin, head - task.head_begin);
            const float* query = task.queries + row * task.query_stride + head * kv.key_dim;
            for (int64_t d = 0; d < kv.padded_key_dim(); d += 8) {
                store(state.query + d, mul(load_part(query + d, kv.key_dim - d), task.scale));
                store(state.out + d, set1(0.0f));
            }
            state.stats[0] = task.sinks ? task.sinks[head] : -3.0e38f;   // a sink is a score with weight 1 and no value
            state.stats[1] = task.sinks ? 1.0f : 0.0f;
        }
    }
}

void finish_states(const KvView& kv, const AttentionTask& task, const SoftmaxStates& states) {
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
        for (int64_t head = task.head_begin; head < task.head_end; ++head) {
            const SoftmaxState state = states.at(row - task.row_begin, head - task.head_begin);
            float* out = task.out + row * task.out_stride + head * kv.value_dim;
            const F32x8 total = set1(state.stats[1]);
            for (int64_t d = 0; d < kv.value_dim; d += 8) {
                store_part(out + d, div(load(state.out + d), total), kv.value_dim - d);
            }
        }
    }
}

// Rows of a task to which the same positions of a tile are visible.
struct RowSet {
    int64_t rows[kAttentionRows];
    int64_t size;
};

template <int Q, typename T>
FOREWORD_INLINE void absorb_queries(const KvView& kv, const Tile<T>& tile, const Tile<T>* next, const VisibleSpan& span,
                                    const SoftmaxState (&states)[Q], float* scores) {
    if (next) {
        absorb_tile<Q, true>(kv, tile, *next, span, states, scores);
    } else {
        absorb_tile<Q, false>(kv, tile, tile, span, states, scores);
    }
}

// Adds a tile to all heads of some rows, in groups of nearly equal size. The first group prefetches `next`, unless it is null.
template <typename T>
void absorb_rows(const KvView& kv, const Tile<T>& tile, const Tile<T>* next, const VisibleSpan& span, const SoftmaxStates& states,
                 const RowSet& row_set, float* scores) {
    const int64_t count = row_set.size * states.heads, groups = (count + kQueryTile - 1) / kQueryTile;
    const auto query = [&](int64_t i) { return states.at(row_set.rows[i / states.heads], i % states.heads); };
    int64_t first = 0;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t size = (count - first + groups - group - 1) / (groups - group);
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

// Adds a tile as it is stored to all heads of some rows.
template <bool IsLatent, typename T>
void absorb_stored(const KvView& kv, const AttentionTask& task, const Tile<T>& tile, const Tile<T>* next, const VisibleSpan& span,
                   const SoftmaxStates& states, const RowSet& row_set, float* scores) {
    if constexpr (IsLatent) {
        float* expanded = task.scratch + attention_tile_floats(kv.padded_key_dim(), false);
        absorb_rows<float>(kv, expanded_tile(kv, tile, expanded), nullptr, span, states, row_set, scores);
    } else {
        absorb_rows<T>(kv, tile, next, span, states, row_set, scores);
    }
}

// Runs a task tile by tile, so that a tile stays in the cache. Rows to which all positions of a tile are visible as they are stored
// use the tile together, the other rows one by one.
template <bool IsLatent, typename T>
void attend(const KvView& kv, const AttentionTask& task) {
    float* scores = task.scratch + attention_tile_floats(kv.padded_key_dim(), IsLatent);
    const SoftmaxStates states{scores + kQueryTile * kKeyTile, kv.padded_key_dim(), task.head_end - task.head_begin};
    const int64_t rows = task.row_end - task.row_begin;
    RowView views[kAttentionRows];
    int64_t first_visible[kAttentionRows];   // position, by row
    int64_t visible = 0, prefix = 0;         // the maxima over the rows
    int64_t earliest = INT64_MAX;            // the minimum of first_visible
    for (int64_t row = 0; row < rows; ++row) {
        views[row] = row_view(task, task.row_begin + row);
        visible = views[row].visible > visible ? views[row].visible : visible;
        prefix = views[row].prefix > prefix ? views[row].prefix : prefix;
        const int64_t window_begin = task.window > 0 ? views[row].visible - task.window : 0;
        first_visible[row] = window_begin > task.start ? window_begin : task.start;
        earliest = first_visible[row] < earliest ? first_visible[row] : earliest;
    }
    begin_states(kv, task, states);
    PartShares shares(task);
    if (task.shares) shares.begin(states);
    for (int64_t begin = earliest / kKeyTile * kKeyTile; begin < visible; begin += kKeyTile) {
        const int64_t end = begin + kKeyTile;
        // Without a window, all rows begin at the same position of their first tile, so they can share it even in part.
        const auto is_shared = [&](int64_t row) {
            return views[row].prefix >= end && (task.window == 0 || first_visible[row] <= begin);
        };
        Tile<T> next{};
        if (prefix > end) next = prefix_tile<T>(kv, task, end, prefix);
        const Tile<T>* prefetched = prefix > end ? &next : nullptr;
        RowSet shared{{}, 0};
        for (int64_t row = 0; row < rows; ++row) {
            if (is_shared(row)) shared.rows[shared.size++] = row;
        }
        if (shared.size > 0) {
            const int64_t hidden_count = task.window == 0 && task.start > begin ? task.start - begin : 0;
            absorb_stored<IsLatent>(kv, task, prefix_tile<T>(kv, task, begin, end), prefetched, {hidden_count, kKeyTile, task.softcap},
                                    states, shared, scores);
        }
        for (int64_t row = 0; row < rows; ++row) {
            const RowView& view = views[row];
            if (is_shared(row) || view.visible <= begin || first_visible[row] >= end) continue;
            const int64_t hidden_count = first_visible[row] > begin ? first_visible[row] - begin : 0;
            const int64_t count = view.visible < end ? view.visible - begin : kKeyTile;
            const Tile<T> tile = view.prefix < begin + count ? gathered_tile<T>(kv, task, view, begin)
                                                             : prefix_tile<T>(kv, task, begin, begin + count);
            absorb_stored<IsLatent, T>(kv, task, tile, nullptr, {hidden_count, count, task.softcap}, states, {{row}, 1}, scores);
        }
        if (task.shares && (end % kSharePart == 0 || end >= visible)) shares.end_part(states, end);
    }
    if (task.shares) shares.finish(visible);
    finish_states(kv, task, states);
}

void store_kv(const KvView& kv, int64_t slot, int64_t head, const float* key, const float* value) {
    switch (kv.dtype) {
        case KvDtype::Float32: return store_row<float>(kv, slot, head, key, value);
        case KvDtype::BFloat16: return store_row<BFloat>(kv, slot, head, key, value);
        case KvDtype::Int8: return store_row<int8_t>(kv, slot, head, key, value);
    }
}

void attention(const KvView& kv, const AttentionTask& task) {
    switch (kv.dtype) {
        case KvDtype::Float32: return kv.is_latent() ? attend<true, float>(kv, task) : attend<false, float>(kv, task);
        case KvDtype::BFloat16: return kv.is_latent() ? attend<true, BFloat>(kv, task) : attend<false, BFloat>(kv, task);
        case KvDtype::Int8: return attend<false, int8_t>(kv, task);   // latent rows are not stored as int8
    }
}

}  // namespace
