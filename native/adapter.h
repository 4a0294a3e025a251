// Low-rank additions to a decoder's matrices (LoRA): y += B (A x), for the rows of the requests that ask for them.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "packed_matrix.h"

namespace foreword {

using Matrix = std::shared_ptr<PackedMatrix>;

// The matrices of a layer that can be added to: those that read the stream to mix positions (query, key and value, or the
// projections of a recurrent layer), what brings the result back, and the MLP's.
enum class Site : int { Input, Key, Value, LastInput, Output, Gate, Up, Down };
constexpr int kSites = 8;
constexpr int64_t kMaxRank = 128;
constexpr int kSitesOfOneInput = 4;

struct Factor {
    Matrix down;   // A [rank, inputs], in the numbers of the matrix that it is added to; null: nothing is added
    Matrix up;     // B [outputs, rank], floats, or a `Factor`; scaled
    int64_t rank() const { return down->view().rows; }
};

struct Adapter {
    std::vector<std::array<Factor, kSites>> layers;
};

// The rows of one request, and what is added for it; the sites of one input side by side.
struct AdaptedRows {
    const Adapter* adapter;
    int64_t begin, end;
};

}  // namespace foreword
