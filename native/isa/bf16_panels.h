// Products of matrices in bfloat16: the outer factors of adapters, which have few columns and many panels. Several
// panels are computed side by side, since one alone would wait for its own sums. An output is a sum in column order.
#pragma once

#include "../types.h"
#include "panel_tiles.h"

namespace {

using namespace foreword;

constexpr int kPanelsAtOnce = 4;

// P panels of T tokens, beginning with token `first`.
template <int P, int T>
FOREWORD_INLINE void bf16_tile(const MatrixView& w, const uint8_t* panel, const ActivationView& x, int64_t first, F32x8 (&sums)[P][T]) {
    const float* rows = x.f32 + first * x.cols;
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) sums[p][t] = set1(0.0f);
    }
    for (int64_t c = 0; c < x.cols; ++c) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const F32x8 weights = load_bf16(reinterpret_cast<const uint16_t*>(panel + p * w.panel_bytes) + c * kPanelRows);
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) sums[p][t] = fma(weights, rows[t * x.cols + c], sums[p][t]);
        }
    }
}

template <int P, int T>
void bf16_columns(const MatrixView& w, const ActivationView& x, int64_t first, int64_t panel, const LinearOutput& out, float* into) {
    F32x8 sums[P][T];
    const uint8_t* ahead = w.data + panel * w.panel_bytes + kPrefetch;
    for (int64_t line = 0; line < P * w.panel_bytes; line += kLine) __builtin_prefetch(ahead + line);
    bf16_tile<P, T>(w, w.data + panel * w.panel_bytes, x, first, sums);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
        const int64_t row = (panel + p) * kPanelRows, rest = w.rows - row;
        const float* bias = out.bias ? out.bias + row : nullptr;
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            finish(sums[p][t], into + (first + t) * out.stride + p * kPanelRows, bias, out.accumulate, rest < kPanelRows ? rest : kPanelRows);
        }
    }
}

template <int T>
void bf16_rows(const MatrixView& w, const ActivationView& x, int64_t first, int64_t panel_begin, int64_t panel_end, const LinearOutput& out) {
    constexpr int P = T == 1 ? kPanelsAtOnce : 1;
    int64_t panel = panel_begin;
    for (; panel + P <= panel_end; panel += P) bf16_columns<P, T>(w, x, first, panel, out, out.out + (panel - panel_begin) * kPanelRows);
    for (; panel < panel_end; ++panel) bf16_columns<1, T>(w, x, first, panel, out, out.out + (panel - panel_begin) * kPanelRows);
}

void run_bf16_panels(const MatrixView& w, const ActivationView& x, int64_t panel_begin, int64_t panel_end, const LinearOutput& out) {
    int64_t first = 0;
    for (; first + kTokenTile <= x.rows; first += kTokenTile) bf16_rows<kTokenTile>(w, x, first, panel_begin, panel_end, out);
    for (; first < x.rows; ++first) bf16_rows<1>(w, x, first, panel_begin, panel_end, out);
}

}  // namespace
