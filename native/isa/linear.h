// Matrix products of all tokens with a range of panels.
#pragma once

#include "../types.h"
#include "factor_panels.h"
#include "panel_tiles.h"
#ifdef __AVX512VNNI__
#include "wide_avx512.h"
#endif

namespace {

using namespace foreword;

#ifdef __AVX512VNNI__
template <WeightFormat F>
void run_wide_panels(const MatrixView& w, const ActivationView& x, int64_t panel_begin, int64_t panel_end,
                     const LinearOutput& out, uint8_t* scratch) {
    for (int64_t begin = 0; begin < x.rows; begin += kTokenBlock) {
        const int64_t end = begin + kTokenBlock < x.rows ? begin + kTokenBlock : x.rows;
        const WideTokens tokens = wide_tokens<F>(w, x, begin, end, scratch);
        for (int64_t panel = panel_begin; panel < panel_end; panel += 2) {
            const PanelPair pair = panel_pair(w, panel, panel_begin, panel_end, out);
            run_pair<F>(w, tokens, end - begin, pair.left, pair.right);
        }
    }
}
#endif

template <WeightFormat F>
void run_panels(const MatrixView& w, const ActivationView& x, int64_t panel_begin, int64_t panel_end,
                const LinearOutput& out, uint8_t* scratch) {
    for (int64_t begin = 0; begin < x.rows; begin += kTokenBlock) {
        const int64_t end = begin + kTokenBlock < x.rows ? begin + kTokenBlock : x.rows;
        for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
            run_panel<F>(w, x, begin, end, panel_target(w, panel, panel_begin, out), scratch);
        }
    }
}

// Block formats: two panels together if vectors are wide enough.
template <WeightFormat F>
void run_blocks(const MatrixView& w, const ActivationView& x, int64_t panel_begin, int64_t panel_end,
                const LinearOutput& out, uint8_t* scratch) {
#ifdef __AVX512VNNI__
    run_wide_panels<F>(w, x, panel_begin, panel_end, out, scratch);
#else
    run_panels<F>(w, x, panel_begin, panel_end, out, scratch);
#endif
}

void linear(const MatrixView& w, const ActivationView& x, int64_t panel_begin, int64_t panel_end,
            const LinearOutput& out, uint8_t* scratch) {
    switch (w.format) {
        case WeightFormat::F32: return run_panels<WeightFormat::F32>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q8: return run_blocks<WeightFormat::Q8>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q4_0: return run_blocks<WeightFormat::Q4_0>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q4_1: return run_blocks<WeightFormat::Q4_1>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q5_0: return run_blocks<WeightFormat::Q5_0>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q5_1: return run_blocks<WeightFormat::Q5_1>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q4_K: return run_blocks<WeightFormat::Q4_K>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q5_K: return run_blocks<WeightFormat::Q5_K>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q6_K: return run_blocks<WeightFormat::Q6_K>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q4_Z: return run_blocks<WeightFormat::Q4_Z>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Factor: return run_factor_panels(w, x, panel_begin, panel_end, out);
    }
}

}  // namespace
