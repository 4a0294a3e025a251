// x86 with AVX-512 VNNI and AMX: products of 8-bit and block formats with many tokens run in tiles. Everything else is avx512-vnni,
// and so are the bits of the products.
#include <algorithm>

#include "simd_avx2.h"
#include "amx_tiles.h"

namespace foreword {

extern const KernelTable kAvx512VnniKernels;

namespace {

constexpr int64_t kChunkColumns = 512;           // at most, or one group: unpacked weights of four panels stay in the first cache
constexpr int64_t kTokenBytes = int64_t{1} << 20;   // levels of a block of tokens, which stay in the second cache

// Finishes and stores the outputs of a pair of panels for one token.
FOREWORD_INLINE void store_pair(const float* sums, const PanelPair& pair, int64_t token) {
    const PanelTarget &left = pair.left, &right = pair.right;
    float* out = left.out + token * left.stride;
    if (left.width + right.width == kPairOutputs && !left.accumulate) {   // outputs and biases of the panels are neighbours
        const __m512 lanes = _mm512_loadu_ps(sums);
        _mm512_storeu_ps(out, left.bias ? _mm512_add_ps(lanes, _mm512_loadu_ps(left.bias)) : lanes);
        return;
    }
    finish(load(sums), out, left.bias, left.accumulate, left.width);
    finish(load(sums + kPanelRows), out + kPanelRows, right.bias, right.accumulate, right.width);
}

// Multiplies a block of tokens, whose first one is token `begin` of the input, with one or two pairs of panels.
template <WeightFormat F, int Pairs, typename Shape>
void run_panels(const MatrixView& w, TokenParts parts, int64_t begin, const PanelPair (&targets)[2], uint8_t* scratch) {
    constexpr bool HasMin = block_layout(F).has_min;
    constexpr int64_t ChunkGroups = kChunkColumns / Shape::kColumns, PairBytes = ChunkGroups * Shape::kWeightBytes;
    float* outputs = reinterpret_cast<float*>(scratch);
    uint8_t* unpacked = scratch + kTiledTokens * kTileOutputs * 4;
    std::memset(outputs, 0, static_cast<size_t>(parts.count() * parts.rows * kTileOutputs * 4));
    PackedPair<F> pairs[2] = {{{targets[0].left.packed}, {targets[0].right.packed}}, {{targets[1].left.packed}, {targets[1].right.packed}}};
    for (int64_t g = 0; g < w.groups; g += ChunkGroups) {
        const int64_t groups = std::min(ChunkGroups, w.groups - g);
        const uint8_t* before = pairs[0].left.weights;
        FetchAhead ahead{{}, 0, 2 * Pairs};
        for (int i = 0; i < 2 * Pairs; ++i) ahead.panels[i] = before + (i + 4) * w.panel_bytes;
        for (int p = 0; p < Pairs; ++p) unpack_pair<F, true>(pairs[p], g, g + groups, Shape::kColumns / kBlock, unpacked + p * PairBytes);
        ahead.bytes = pairs[0].left.weights - before;
        if (parts.tiles() == 2) run_chunk<2, Pairs, Shape, HasMin>(parts, unpacked, unpacked + PairBytes, groups, ahead, outputs);
        else run_chunk<1, Pairs, Shape, HasMin>(parts, unpacked, unpacked + PairBytes, groups, ahead, outputs);
        parts.q += groups * Shape::kColumns, parts.scale += groups, parts.sum += groups;
    }
    for (int64_t part = 0, stored = 0; part < parts.count(); ++part) {
        const int64_t first = parts.first_of(part), end = first + parts.rows;
        for (; stored < end; ++stored) {
            const float* sums = outputs + (part * parts.rows + stored - first) * kTileOutputs;
            store_pair(sums, targets[0], begin + stored);
            if constexpr (Pairs == 2) store_pair(sums + kPairOutputs, targets[1], begin + stored);
        }
    }
}

template <WeightFormat F, typename Shape>
void run_in_tiles(const MatrixView& w, const ActivationView& x, int64_t panel_begin, int64_t panel_end, const LinearOutput& out, uint8_t* scratch) {
    const int64_t stride = w.groups * Shape::kColumns, most = std::clamp(kTokenBytes / stride, 2 * kTileRows, kTiledTokens);
    const int64_t blocks = (x.rows + most - 1) / most;
    for (int64_t i = 0; i < blocks; ++i) {
        const int64_t begin = x.rows * i / blocks, tokens = x.rows * (i + 1) / blocks - begin;
        const int64_t count = (tokens + 2 * kTileRows - 1) / (2 * kTileRows);
        const TokenParts parts{x.q + begin * stride, x.scale + begin * w.groups, x.sum + begin * w.groups, stride, w.groups, tokens,
                               (tokens + count - 1) / count};
        configure_tiles(parts.first_rows(), parts.rows - parts.first_rows(), Shape::kStep);
        for (int64_t panel = panel_begin; panel < panel_end; panel += 4) {
            const PanelPair first = panel_pair(w, panel, panel_begin, panel_end, out);
            if (panel + 2 < panel_end) run_panels<F, 2, Shape>(w, parts, begin, {first, panel_pair(w, panel + 2, panel_begin, panel_end, out)}, scratch);
            else run_panels<F, 1, Shape>(w, parts, begin, {first, first}, scratch);
        }
    }
    release_tiles();
}

// Groups of 32 columns, as in GGUF's blocks, use half of a tile register.
template <WeightFormat F>
void run_blocks_in_tiles(const MatrixView& w, const ActivationView& x, int64_t panel_begin, int64_t panel_end, const LinearOutput& out, uint8_t* scratch) {
    if (x.rows < kMinTiledBlockTokens) return kAvx512VnniKernels.linear(w, x, panel_begin, panel_end, out, scratch);
    run_in_tiles<F, GroupShape<32, 1>>(w, x, panel_begin, panel_end, out, scratch);
}

void linear_in_tiles(const MatrixView& w, const ActivationView& x, int64_t panel_begin, int64_t panel_end, const LinearOutput& out, uint8_t* scratch) {
    const auto untiled = [&] { kAvx512VnniKernels.linear(w, x, panel_begin, panel_end, out, scratch); };
    if (x.rows < kMinTiledTokens) return untiled();
    switch (w.format) {
        case WeightFormat::Q8:
            switch (w.grouping.group_size) {
                case 32: return run_blocks_in_tiles<WeightFormat::Q8>(w, x, panel_begin, panel_end, out, scratch);
                case 64: return run_in_tiles<WeightFormat::Q8, GroupShape<64, 1>>(w, x, panel_begin, panel_end, out, scratch);
                case 128: return run_in_tiles<WeightFormat::Q8, GroupShape<64, 2>>(w, x, panel_begin, panel_end, out, scratch);
                case 192: return run_in_tiles<WeightFormat::Q8, GroupShape<64, 3>>(w, x, panel_begin, panel_end, out, scratch);
                default: return untiled();
            }
        case WeightFormat::Q4_0: return run_blocks_in_tiles<WeightFormat::Q4_0>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q4_1: return run_blocks_in_tiles<WeightFormat::Q4_1>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q5_0: return run_blocks_in_tiles<WeightFormat::Q5_0>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q5_1: return run_blocks_in_tiles<WeightFormat::Q5_1>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q4_K: return run_blocks_in_tiles<WeightFormat::Q4_K>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q5_K: return run_blocks_in_tiles<WeightFormat::Q5_K>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q4_Z: return run_blocks_in_tiles<WeightFormat::Q4_Z>(w, x, panel_begin, panel_end, out, scratch);
        case WeightFormat::Q6_K:   // two scales in 32 columns: in tiles it was not measured to be faster
        case WeightFormat::F32:
        case WeightFormat::Factor: return untiled();
    }
}

}  // namespace

KernelTable avx512_amx_kernels() {
    KernelTable kernels = kAvx512VnniKernels;
    kernels.name = "avx512-amx";
    kernels.linear = linear_in_tiles;
    return kernels;
}

}  // namespace foreword
