// Products with the outer factors of adapters (format Factor): matrices with few columns and many panels. Several panels are
// computed together, because a single one would wait for its own sums.
#pragma once

#include "../types.h"
#include "panel_tiles.h"

namespace {

using namespace foreword;

constexpr int kPanelsAtOnce = 4;

// Adds the products of 32 columns, or of the first 16 (not Whole).
template <bool Whole>
FOREWORD_INLINE I32x8 dot_factor(I32x8 acc, const uint8_t* weights, X32 x) {
    acc = dot<0, false>(acc, load_weights(weights), x);
    acc = dot<1, false>(acc, load_weights(weights + 32), x);
    acc = dot<2, false>(acc, load_weights(weights + 64), x);
    acc = dot<3, false>(acc, load_weights(weights + 96), x);
    if constexpr (Whole) {
        acc = dot<4, false>(acc, load_weights(weights + 128), x);
        acc = dot<5, false>(acc, load_weights(weights + 160), x);
        acc = dot<6, false>(acc, load_weights(weights + 192), x);
        acc = dot<7, false>(acc, load_weights(weights + 224), x);
    }
    return acc;
}

// Computes P panels of one token's output, from `out_row` on.
template <int P>
FOREWORD_INLINE void factor_columns(const MatrixView& w, const ActivationView& x, int64_t token, int64_t panel, const LinearOutput& out,
                                    float* out_row) {
    const uint8_t* data = w.data + panel * w.panel_bytes;
    const int8_t* q = x.q + token * w.grouping.group_size;
    const int64_t columns = factor_columns_of(w.cols);
    I32x8 acc[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[p] = zero_sums();
    int64_t c = 0;
    for (; c + kBlock <= columns; c += kBlock) {
        const X32 block = load_tokens(q + c);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[p] = dot_factor<true>(acc[p], data + p * w.panel_bytes + kFactorHeader + kPanelRows * c, block);
    }
    if (c < columns) {
        const X32 block = load_tokens(q + c);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[p] = dot_factor<false>(acc[p], data + p * w.panel_bytes + kFactorHeader + kPanelRows * c, block);
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
        const int64_t row = (panel + p) * kPanelRows, remaining_rows = w.rows - row;
        const F32x8 scales = mul(load(reinterpret_cast<const float*>(data + p * w.panel_bytes)), x.scale[token]);
        finish(mul(to_float(acc[p]), scales), out_row + p * kPanelRows, out.bias ? out.bias + row : nullptr, out.accumulate,
               remaining_rows < kPanelRows ? remaining_rows : kPanelRows);
    }
}

void run_factor_panels(const MatrixView& w, const ActivationView& x, int64_t panel_begin, int64_t panel_end, const LinearOutput& out) {
    for (int64_t token = 0; token < x.rows; ++token) {
        float* out_row = out.out + token * out.stride;
        int64_t panel = panel_begin;
        for (; panel + kPanelsAtOnce <= panel_end; panel += kPanelsAtOnce, out_row += kPanelsAtOnce * kPanelRows) {
            factor_columns<kPanelsAtOnce>(w, x, token, panel, out, out_row);
        }
        for (; panel < panel_end; ++panel, out_row += kPanelRows) factor_columns<1>(w, x, token, panel, out, out_row);
    }
}

}  // namespace
