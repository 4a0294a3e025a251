// The convolutions around the sublayers of a block head.
#include <algorithm>

#include "stack_pass.h"

namespace foreword {

void StackPass::set_sublayer_input(const std::vector<float>& norm, const BlockConvolution* convolution, const PackedMatrix& reader,
                                   const SiteRange& sites, int thread) {
    if (!convolution) return norm_rows(norm, reader, sites, thread);
    const int64_t hidden = shape_.hidden_size;
    const PackedMatrix& projection = *convolution->projection;
    const ActivationView projection_input = linear_input(projection, batch_.rows), input = linear_input(reader, batch_.rows);
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        float* normed = block_input_ + row * hidden;
        kernels_.rms_norm(stream(row), norm.data(), shape_.rms_norm_eps, hidden, normed);
        set_input_row(projection, normed, row, projection_input);
    });
    run_linears({{&projection, {block_weights_, projection.view().rows, nullptr, false}}}, projection_input, thread);
    float* convolved = scratch_of(thread);
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        convolve_block_row(*convolution, 0, block_input_, row, convolved);
        set_input_row(reader, convolved, row, input);
        project_low_rank(reader, row, sites, thread);
    });
}

void StackPass::convolve_block_row(const BlockConvolution& convolution, int64_t side, const float* values, int64_t row, float* out) const {
    const int64_t hidden = shape_.hidden_size, groups = hidden / convolution.group, width = convolution.projection->view().rows;
    const int32_t* first_row = std::upper_bound(batch_.row_starts, batch_.row_starts + batch_.requests, row) - 1;   // of the row's block
    const int64_t taps = std::min<int64_t>(convolution.taps, row - *first_row + 1);
    std::fill_n(out, hidden, 0.0f);
    for (int64_t tap = 0; tap < taps; ++tap) {
        const int64_t side_and_tap = side * convolution.taps + tap;
        const float *base = convolution.base.data() + side_and_tap * hidden, *in = values + (row - tap) * hidden;
        const float* computed = block_weights_ + row * width + side_and_tap * groups;
        for (int64_t d = 0; d < hidden; ++d) out[d] += (base[d] + computed[d / convolution.group]) * in[d];
    }
}

}  // namespace foreword
