// Many tokens on AVX-512 VNNI: two panels side by side in vectors of sixteen outputs. The instruction multiplies
// unsigned with signed bytes, so weights are moved up by 128 and 128 times the sum of a token's group is taken off
// again: the integer sums, and with them all bits of the result, are those of the narrow tiles.
#pragma once

#include "../types.h"
#include "panel_tiles.h"

namespace {

using namespace foreword;

constexpr int64_t kWideTile = 8;       // tokens whose sums stay in registers
constexpr int64_t kWideVector = 64;    // bytes: 16 rows x 4 columns
constexpr int64_t kWideHeader = 128;   // 16 scales, 16 minima

// Tokens [begin, end), what their sums start from, and the memory behind that for a pair of panels.
struct WideTokens {
    int64_t begin, end;
    const int32_t* starts;   // [tokens, groups]
    uint8_t* pair;
};

// The sum of a group's levels is `sum / scale`, rounded: both stem from one multiplication, off by far less than half.
inline WideTokens wide_tokens(const ActivationView& x, int64_t begin, int64_t end, uint8_t* scratch) {
    int32_t* starts = reinterpret_cast<int32_t*>(scratch);
    const int64_t first = begin * x.groups, count = (end - begin) * x.groups;
    for (int64_t i = 0; i < count; ++i) {
        const float scale = x.scale[first + i], sum = x.sum[first + i];
        starts[i] = scale > 0.0f ? -128 * static_cast<int32_t>(__builtin_rintf(sum / scale)) : 0;   // a NaN stays with its scale
    }
    return {begin, end, starts, scratch + (count * 4 + kLine - 1) / kLine * kLine};
}

FOREWORD_INLINE void store_shifted(uint8_t* out, W32 w) {
    const __m256i shifted = _mm256_xor_si256(w.v, _mm256_set1_epi8(static_cast<char>(0x80)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), shifted);
}

// One of the two panels into its half of every vector.
template <Form F>
void spread_half(const uint8_t* panel, int64_t groups, int64_t blocks, uint8_t* out) {
    using B = Block<F>;
    for (int64_t g = 0; g < groups; ++g) {
        const PackedPanel<F> packed{panel};
        store(reinterpret_cast<float*>(out), packed.scales());
        if constexpr (B::has_min) store(reinterpret_cast<float*>(out + kWideHeader / 2), packed.minima());
        panel += B::header;
        out += kWideHeader;
        for (int64_t block = 0; block < blocks; ++block, panel += B::bytes, out += kBlock / 4 * kWideVector) {
            if constexpr (B::nibbles) {
                for (int64_t j = 0; j < 4; ++j) {
                    const WeightPair w = unpack_nibbles<B::bias>(panel + 32 * j);
                    store_shifted(out + j * kWideVector, w.low);
                    store_shifted(out + (j + 4) * kWideVector, w.high);
                }
            } else {
                for (int64_t j = 0; j < 8; ++j) store_shifted(out + j * kWideVector, load_weights(panel + 32 * j));
            }
        }
    }
}

FOREWORD_INLINE __m512 wide_floats(const uint8_t* p) { return _mm512_loadu_ps(reinterpret_cast<const float*>(p)); }

// Sixteen outputs of T tokens, beginning with token `first` of the block.
template <bool HasMin, int T>
__attribute__((noinline)) void run_wide_tile(const ActivationView& x, const WideTokens& tokens, int64_t first,
                                             const PanelTarget& left, const PanelTarget& right) {
    const int64_t groups = x.groups, stride = groups * left.blocks * kBlock;
    const int8_t* q = x.q + (tokens.begin + first) * stride;
    const float* scale = x.scale + (tokens.begin + first) * groups;
    const float* sum = x.sum + (tokens.begin + first) * groups;
    const int32_t* starts = tokens.starts + first * groups;
    const uint8_t* weights = tokens.pair;
    __m512 out[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) out[t] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g) {
        const __m512 scales = wide_floats(weights), minima = wide_floats(weights + kWideHeader / 2);
        weights += kWideHeader;
        __m512i acc[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) acc[t] = _mm512_set1_epi32(starts[t * groups + g]);
        for (int64_t block = 0; block < left.blocks; ++block, weights += kBlock / 4 * kWideVector, q += kBlock) {
#pragma GCC unroll 8
            for (int quad = 0; quad < kBlock / 4; ++quad) {
                const __m512i w = _mm512_loadu_si512(weights + quad * kWideVector);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    int32_t four;
                    std::memcpy(&four, q + t * stride + 4 * quad, 4);
                    acc[t] = _mm512_dpbusd_epi32(acc[t], w, _mm512_set1_epi32(four));
                }
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            const __m512 factor = _mm512_mul_ps(scales, _mm512_set1_ps(scale[t * groups + g]));
            out[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[t]), factor, out[t]);
            if constexpr (HasMin) out[t] = _mm512_fmadd_ps(minima, _mm512_set1_ps(sum[t * groups + g]), out[t]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
        const int64_t row = tokens.begin + first + t;
        finish({_mm512_castps512_ps256(out[t])}, left.out + row * left.stride, left.bias, left.accumulate, left.width);
        finish({_mm512_extractf32x8_ps(out[t], 1)}, right.out + row * right.stride, right.bias, right.accumulate, right.width);
    }
}

// All tokens of a block through two panels, in tiles of nearly equal size.
template <Form F>
void run_pair(const MatrixView& w, const ActivationView& x, const WideTokens& tokens, const PanelTarget& left,
              const PanelTarget& right) {
    constexpr bool M = Block<F>::has_min;
    spread_half<F>(left.packed, w.groups, left.blocks, tokens.pair);
    spread_half<F>(right.packed, w.groups, right.blocks, tokens.pair + kWideVector / 2);
    const int64_t count = tokens.end - tokens.begin, tiles = (count + kWideTile - 1) / kWideTile;
    int64_t first = 0;
    for (int64_t index = 0; index < tiles; ++index) {
        const int64_t size = (count - first + tiles - index - 1) / (tiles - index);
        switch (size) {   // of at least 16 tokens none is smaller than 5
            case 5: run_wide_tile<M, 5>(x, tokens, first, left, right); break;
            case 6: run_wide_tile<M, 6>(x, tokens, first, left, right); break;
            case 7: run_wide_tile<M, 7>(x, tokens, first, left, right); break;
            default: run_wide_tile<M, 8>(x, tokens, first, left, right); break;
        }
        first += size;
    }
}

}  // namespace
