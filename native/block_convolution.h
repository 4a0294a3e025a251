// Convolutions of a block head (DFlash2) over the rows of a request.
#pragma once

#include <memory>
#include <vector>

#include "packed_matrix.h"

namespace foreword {

// Two convolutions around attention or an MLP: of its input and of its output. A row's weights are `base` plus weights that
// `projection` computes from the row's normed input.
struct BlockConvolution {
    int64_t taps;                               // rows that a row reads: its own, and those before it in its request
    int64_t group;                              // adjacent channels that share computed weights
    std::vector<float> base;                    // [2, taps, hidden]
    std::shared_ptr<PackedMatrix> projection;   // [2 * taps * hidden / group, hidden]
};

}  // namespace foreword
