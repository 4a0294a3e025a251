// The arrays of a forward batch; backends/batch.py documents them and has them in the same order.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace foreword {

// type, name, number of entries, values per entry
#define FOREWORD_BATCH_ARRAYS(ARRAY)              \
    ARRAY(int64_t, ancestor_masks, rows, 1)       \
    ARRAY(int32_t, token_ids, rows, 1)            \
    ARRAY(int32_t, positions, rows, 1)            \
    ARRAY(int32_t, slots, rows, 1)                \
    ARRAY(int32_t, prefix_lens, rows, 1)          \
    ARRAY(int32_t, row_starts, requests + 1, 1)   \
    ARRAY(int32_t, block_tables, requests, pages) \
    ARRAY(int32_t, kv_lens, requests, 1)          \
    ARRAY(int32_t, logit_rows, logit_count, 1)    \
    ARRAY(int32_t, kv_copies, copies, 2)          \
    ARRAY(int32_t, hidden_rows, hidden_count, 1)

// Where hidden states are read: before layer `layer`; the number of layers means after the last one.
struct Tap {
    int64_t layer;
    bool is_normed;   // after the final norm
};

// A chunk of a request in recurrent layers: the state before position `start`, and the ring of the rows from there on.
struct StateChunk {
    int64_t start;
    int64_t state;
    int64_t ring;   // -1: only the state is written
};

// States and rings that a request's rows read and write, as in backends/batch.py.
struct RequestChunks {
    int64_t begin;   // position of the request's first row
    int64_t run;     // committed tokens of the pass; draft nodes follow
    StateChunk read;
    std::vector<StateChunk> entered;
};

struct Batch {
#define ARRAY(type, name, entries, values) const type* name = nullptr;
    FOREWORD_BATCH_ARRAYS(ARRAY)
#undef ARRAY
    int64_t rows = 0, requests = 0, pages = 0, logit_count = 0, copies = 0, hidden_count = 0;
    std::vector<Tap> taps;
    std::vector<RequestChunks> chunks;                       // [requests]; empty without recurrent layers
    std::vector<std::pair<int64_t, int64_t>> ring_copies;    // (from, to) rows of rings, copied before the layers run
    std::vector<int32_t> adapters;   // [requests], adapter slots; empty, or 0 for a request: no adapter
};

}  // namespace foreword
