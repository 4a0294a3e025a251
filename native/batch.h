// The arrays of a forward batch. What they mean is said in backends/batch.py, which has them in the same order.
#pragma once

#include <cstdint>
#include <vector>

namespace foreword {

// type, name, entries, numbers of an entry
#define FOREWORD_BATCH_ARRAYS(ARRAY)              \
    ARRAY(int64_t, ancestor_masks, rows, 1)       \
    ARRAY(int32_t, token_ids, rows, 1)            \
    ARRAY(int32_t, positions, rows, 1)            \
    ARRAY(int32_t, slots, rows, 1)                \
    ARRAY(int32_t, prefix_lens, rows, 1)          \
    ARRAY(int32_t, row_starts, requests + 1, 1)   \
    ARRAY(int32_t, block_tables, requests, pages) \
    ARRAY(int32_t, kv_lens, requests, 1)          \
    ARRAY(int32_t, logit_rows, wanted, 1)         \
    ARRAY(int32_t, kv_copies, copies, 2)          \
    ARRAY(int32_t, hidden_rows, hidden_wanted, 1)

// Where hidden states are taken: after so many layers, before or after the final norm.
struct Tap {
    int64_t layer;
    bool normed;
};

struct Batch {
#define ARRAY(type, name, entries, numbers) const type* name = nullptr;
    FOREWORD_BATCH_ARRAYS(ARRAY)
#undef ARRAY
    int64_t rows = 0, requests = 0, pages = 0, wanted = 0, copies = 0, hidden_wanted = 0;
    std::vector<Tap> taps;
    std::vector<int32_t> adapters;   // [requests], slot of each request's adapter; 0, or an empty list: the model itself
};

}  // namespace foreword
