// LoRA adapters: y += B (A x) for the rows of the requests that use one.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "packed_matrix.h"

namespace foreword {

using Matrix = std::shared_ptr<PackedMatrix>;

// The matrices of a layer that an adapter can change: up to four input projections (`Input` to `LastInput`; in attention
// query, key and value), the output projection and those of the MLP.
enum class Site : int { Input, Key, Value, LastInput, Output, Gate, Up, Down };
constexpr int kSites = 8;
constexpr int64_t kMaxRank = 128;
constexpr int kSitesOfOneInput = 4;   // maximum sites that read the same input

struct Factor {
    Matrix down;   // A [rank, inputs], in a format that reads the same input as the changed matrix; null: no change
    Matrix up;     // B [outputs, rank] times the adapter's scale, in F32 or Factor format
    int64_t rank() const { return down->view().rows; }
};

struct Adapter {
    std::vector<std::array<Factor, kSites>> layers;
};

// The rows [begin, end) of a request that uses an adapter.
struct AdaptedRows {
    const Adapter* adapter;
    int64_t begin, end;
};

}  // namespace foreword
