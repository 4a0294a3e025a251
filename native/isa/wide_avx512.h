// AVX-512 VNNI: products with two panels in vectors of sixteen outputs. The instruction multiplies unsigned by signed bytes, so
// the bias is not subtracted from stored levels (to 8-bit levels 128 is added). Instead, the bias times the sum of the token's
// levels is subtracted from the product. The integer sums, and so all bits of the result, equal those of panel_tiles.h.
#pragma once

#include "../types.h"
#include "panel_tiles.h"

namespace {

using namespace foreword;

constexpr int64_t kWideTile = 8;       // tokens whose sums stay in registers
constexpr int64_t kWideVector = 64;    // bytes: 16 rows x 4 columns
constexpr int64_t kWideHeader = 128;   // 16 scales, 16 minima or second scales
constexpr int64_t kUnpackTokens = 33;  // from this many tokens on, levels are unpacked once for all tiles

// The bias of the unsigned levels in the products.
template <WeightFormat F>
constexpr int kWideBias = block_layout(F).bits == 8 ? 128 : block_layout(F).bias;

FOREWORD_INLINE __m512 joined(F32x8 left, F32x8 right) { return _mm512_insertf32x8(_mm512_castps256_ps512(left.v), right.v, 1); }
FOREWORD_INLINE __m512i joined(const uint8_t* left, const uint8_t* right) {
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(right));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(left))), second, 1);
}

template <int Shift, int Mask>
FOREWORD_INLINE __m512i shifted_bits(__m512i v) {
    const __m512i shifted = Shift >= 0 ? _mm512_slli_epi16(v, Shift >= 0 ? Shift : 0) : _mm512_srli_epi16(v, Shift < 0 ? -Shift : 0);
    return _mm512_and_si512(shifted, _mm512_set1_epi8(Mask));
}

// Levels of the columns 4J..4J+3 (low) and 16+4J..16+4J+3 (high) of a group, for 16 rows.
struct WidePair {
    __m512i low, high;
};

template <int Bias>
FOREWORD_INLINE WidePair signed_levels(WidePair levels) {
    if constexpr (Bias == 0) return levels;
    const __m512i bias = _mm512_set1_epi8(static_cast<char>(Bias));
    if constexpr (Bias == 128) return {_mm512_xor_si512(levels.low, bias), _mm512_xor_si512(levels.high, bias)};
    return {_mm512_sub_epi8(levels.low, bias), _mm512_sub_epi8(levels.high, bias)};
}

// Reads two panels as they are stored, group by group.
template <WeightFormat F>
struct PackedPair {
    static constexpr int kScales = block_layout(F).scales;
    static constexpr bool kHasMin = block_layout(F).has_min, kHasStarts = kWideBias<F> != 0;
    PackedPanel<F> left, right;
    FOREWORD_INLINE void enter(int64_t g) { left.enter(g), right.enter(g); }
    FOREWORD_INLINE __m512 scales(int half) const { return joined(left.scales(half), right.scales(half)); }
    FOREWORD_INLINE __m512 minima() const { return joined(left.minima(), right.minima()); }
    FOREWORD_INLINE void fetch() const {
#pragma GCC unroll 4
        for (int i = 0; i < kLines<F>; ++i) {
            __builtin_prefetch(left.weights + kPrefetch + i * kCacheLine);
            __builtin_prefetch(right.weights + kPrefetch + i * kCacheLine);
        }
    }
    template <int J>
    FOREWORD_INLINE WidePair levels() const {
        constexpr int Bits = PackedPanel<F>::kBits;
        const auto vector = [&](int64_t offset) FOREWORD_INLINE_LAMBDA { return joined(left.weights + offset, right.weights + offset); };
        if constexpr (Bits == 8) {
            const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
            return {_mm512_xor_si512(vector(32 * J), sign), _mm512_xor_si512(vector(32 * (J + 4)), sign)};
        } else {
            const __m512i both = vector(32 * J);
            WidePair levels{shifted_bits<0, 15>(both), shifted_bits<-4, 15>(both)};
            if constexpr (Bits == 5) {
                const __m512i upper_bits = vector(128);
                levels.low = _mm512_or_si512(levels.low, shifted_bits<4 - J, 16>(upper_bits));
                levels.high = _mm512_or_si512(levels.high, shifted_bits<-J, 16>(upper_bits));
            } else if constexpr (Bits == 6) {
                levels.low = _mm512_or_si512(levels.low, shifted_bits<4 - 2 * J, 48>(vector(128)));
                levels.high = _mm512_or_si512(levels.high, shifted_bits<4 - 2 * J, 48>(vector(160)));
            }
            return levels;
        }
    }
    FOREWORD_INLINE void advance() { left.weights += left.kBytes, right.weights += right.kBytes; }
};

// Two panels whose levels were unpacked to bytes, for several tiles: per group a header, then eight vectors for every 32 columns.
// It is the same type for all formats with the same number of scales and minima, so that they share compiled tiles.
template <int Scales, bool HasMin>
struct UnpackedPair {
    static constexpr int kScales = Scales;
    static constexpr bool kHasMin = HasMin, kHasStarts = !HasMin;   // the formats with a minimum have no bias
    const uint8_t* data;
    const uint8_t* header = nullptr;
    FOREWORD_INLINE void enter(int64_t) {
        header = data;
        data += kWideHeader;
    }
    FOREWORD_INLINE __m512 scales(int half) const { return _mm512_loadu_ps(header + kWideHeader / 2 * half); }
    FOREWORD_INLINE __m512 minima() const { return _mm512_loadu_ps(header + kWideHeader / 2); }
    FOREWORD_INLINE void fetch() const {}
    template <int J>
    FOREWORD_INLINE WidePair levels() const {
        return {_mm512_loadu_si512(data + J * kWideVector), _mm512_loadu_si512(data + (J + 4) * kWideVector)};
    }
    FOREWORD_INLINE void advance() { data += kBlock / 4 * kWideVector; }
};

// Writes the groups [begin, end) of an UnpackedPair, and advances `pair` to the end. With `Signed` the bias is subtracted from the
// levels.
template <WeightFormat F, bool Signed>
void unpack_pair(PackedPair<F>& pair, int64_t begin, int64_t end, int64_t blocks, uint8_t* out) {
    for (int64_t g = begin; g < end; ++g) {
        pair.enter(g);
        _mm512_storeu_ps(out, pair.scales(0));
        if constexpr (block_layout(F).scales == 2) _mm512_storeu_ps(out + kWideHeader / 2, pair.scales(1));
        if constexpr (block_layout(F).has_min) _mm512_storeu_ps(out + kWideHeader / 2, pair.minima());
        out += kWideHeader;
        for (int64_t block = 0; block < blocks; ++block, pair.advance(), out += kBlock / 4 * kWideVector) {
            if constexpr (Signed) pair.fetch();
            const auto vector = [&](auto j) FOREWORD_INLINE_LAMBDA {
                constexpr int J = decltype(j)::value;
                const WidePair levels = signed_levels<Signed ? kWideBias<F> : 0>(pair.template levels<J>());
                _mm512_storeu_si512(out + J * kWideVector, levels.low);
                _mm512_storeu_si512(out + (J + 4) * kWideVector, levels.high);
            };
            vector(Index<0>{}), vector(Index<1>{}), vector(Index<2>{}), vector(Index<3>{});
        }
    }
}

// A tile of tokens: their levels, scales and sums in the order in which the products read them (group_bytes).
struct WideTile {
    int64_t begin;     // its first token
    int64_t count;
    const uint8_t* groups;
};

// The tiles of a block of tokens, of nearly equal size.
struct WideTokens {
    WideTile tiles[kTokenBlock / kWideTile];
    int64_t count;
    uint8_t* unpacked;   // memory for an UnpackedPair
};

// Numbers of a tile that a group of a format has for every token: initial sums, and scale and sum.
template <typename Pair>
constexpr int kStarts = Pair::kHasStarts ? Pair::kScales : 0;
template <typename Pair>
constexpr int kFactors = Pair::kHasMin ? 2 : 1;

// Returns the sums of 16 consecutive levels; each is in all four lanes of its quarter.
FOREWORD_INLINE __m512i sums_of_sixteen(const int8_t* q) {
    __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), _mm512_loadu_si512(q));
    sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
    return _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
}

// Computes the initial sums of a row of levels, -bias times the sum of the levels, for every scale of a group.
template <WeightFormat F>
void compute_starts(const int8_t* q, int64_t columns, int64_t group_size, int32_t* starts) {
    if constexpr (block_layout(F).scales == 2) {
        for (int64_t c = 0; c < columns; c += 64, starts += 4) {
            const __m512i biased = _mm512_mullo_epi32(sums_of_sixteen(q + c), _mm512_set1_epi32(-kWideBias<F>));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(starts), _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, biased)));
        }
    } else {
        for (int64_t c = 0; c < columns; c += group_size, ++starts) {
            __m256i sums = _mm256_setzero_si256();
            for (int64_t i = 0; i < group_size; i += kBlock) {
                sums = _mm256_dpbusd_epi32(sums, _mm256_set1_epi8(1), load_vector(reinterpret_cast<const uint8_t*>(q + c + i)));
            }
            *starts = -kWideBias<F> * _mm512_reduce_add_epi32(_mm512_zextsi256_si512(sums));
        }
    }
}

// Writes the levels of 32 columns of `count` tokens so that four columns of all tokens are consecutive. Writes up to 28 bytes
// after them.
FOREWORD_INLINE void interleave_levels(const int8_t* q, int64_t stride, int64_t count, uint8_t* out) {
    if (count == 1) {
        std::memcpy(out, q, kBlock);
        return;
    }
    F32x8 quads[8];
#pragma GCC unroll 8
    for (int64_t t = 0; t < kWideTile; ++t) quads[t] = load(reinterpret_cast<const float*>(q + (t < count ? t : count - 1) * stride));
    transpose(quads);
#pragma GCC unroll 8
    for (int64_t quad = 0; quad < 8; ++quad) store(reinterpret_cast<float*>(out + quad * 4 * count), quads[quad]);
}

// Writes a tile; per group initial sums, levels, scales and sums of all tokens. Returns the end.
template <WeightFormat F>
uint8_t* write_tile(const MatrixView& w, const ActivationView& x, const WideTile& tile, const int32_t* starts, uint8_t* out) {
    using Pair = PackedPair<F>;
    const int64_t groups = x.groups, group_size = w.grouping.group_size, stride = groups * group_size, count = tile.count;
    const int8_t* q = x.q + tile.begin * stride;
    const auto put = [&](auto value_of) FOREWORD_INLINE_LAMBDA {
        for (int64_t t = 0; t < count; ++t, out += 4) {
            const auto value = value_of(t);
            std::memcpy(out, &value, 4);
        }
    };
    for (int64_t g = 0; g < groups; ++g) {
        for (int s = 0; s < kStarts<Pair>; ++s) put([&](int64_t t) { return starts[(t * groups + g) * kStarts<Pair> + s]; });
        for (int64_t block = 0; block < group_size / kBlock; ++block, q += kBlock, out += kBlock * count) interleave_levels(q, stride, count, out);
        put([&](int64_t t) { return x.scale[(tile.begin + t) * groups + g]; });
        if constexpr (Pair::kHasMin) put([&](int64_t t) { return x.sum[(tile.begin + t) * groups + g]; });
    }
    return out;
}

// Prepares the tokens [begin, end). `scratch` has linear_scratch_bytes().
template <WeightFormat F>
WideTokens wide_tokens(const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, uint8_t* scratch) {
    constexpr int Starts = kStarts<PackedPair<F>>;
    WideTokens tokens{{}, (end - begin + kWideTile - 1) / kWideTile, nullptr};
    const int64_t columns = x.groups * w.grouping.group_size, row_starts = x.groups * Starts;
    int32_t* starts = reinterpret_cast<int32_t*>(scratch);   // of one tile
    uint8_t* out = scratch + kWideTile * row_starts * 4;
    for (int64_t index = 0, first = begin; index < tokens.count; ++index) {
        const int64_t size = (end - first + tokens.count - index - 1) / (tokens.count - index);
        tokens.tiles[index] = {first, size, out};
        for (int64_t t = 0; Starts > 0 && t < size; ++t) {
            compute_starts<F>(x.q + (first + t) * columns, columns, w.grouping.group_size, starts + t * row_starts);
        }
        out = write_tile<F>(w, x, tokens.tiles[index], starts, out);
        first += size;
    }
    tokens.unpacked = scratch + (out - scratch + kCacheLine - 1) / kCacheLine * kCacheLine;
    return tokens;
}

// Adds the products of four columns: `levels` of 16 rows, and `quads` [T] of the tokens. The broadcast is part of the
// instruction, which the compiler does not do by itself.
template <int T>
FOREWORD_INLINE void wide_dots(__m512i (&acc)[T], __m512i levels, const uint8_t* quads) {
    typedef int32_t __attribute__((may_alias, aligned(1))) Quad;
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc[t]) : "v"(levels), "m"(reinterpret_cast<const Quad*>(quads)[t]));
    }
}

FOREWORD_INLINE __m512 broadcast(const uint8_t* number) {
    float value;
    std::memcpy(&value, number, 4);
    return _mm512_set1_ps(value);
}

// Computes sixteen outputs of the T tokens of a tile. A group has `Blocks` blocks of 32 columns, or `any_blocks` if that is 0.
template <int T, int Blocks, typename Pair>
__attribute__((noinline)) void run_wide_tile(Pair pair, int64_t groups, int64_t any_blocks, const WideTile& tile, const PanelTarget& left,
                                             const PanelTarget& right) {
    constexpr int Scales = Pair::kScales;
    const int64_t blocks = Blocks > 0 ? Blocks : any_blocks;
    const uint8_t* numbers = tile.groups;
    __m512 out[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) out[t] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g) {
        pair.enter(g);
        __m512i acc[Scales][T];
#pragma GCC unroll 2
        for (int s = 0; s < Scales; ++s) {
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                acc[s][t] = Pair::kHasStarts ? _mm512_castps_si512(broadcast(numbers + 4 * (s * T + t))) : _mm512_setzero_si512();
            }
        }
        numbers += 4 * T * kStarts<Pair>;
        for (int64_t block = 0; block < blocks; ++block, numbers += kBlock * T) {
            pair.fetch();
            const auto vector = [&](auto j) FOREWORD_INLINE_LAMBDA {
                constexpr int J = decltype(j)::value;
                const WidePair levels = pair.template levels<J>();
                wide_dots<T>(acc[0], levels.low, numbers + 4 * T * J);
                wide_dots<T>(acc[Scales - 1], levels.high, numbers + 4 * T * (J + 4));
            };
            vector(Index<0>{}), vector(Index<1>{}), vector(Index<2>{}), vector(Index<3>{});
            pair.advance();
        }
#pragma GCC unroll 2
        for (int s = 0; s < Scales; ++s) {
            const __m512 scales = pair.scales(s);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                out[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[s][t]), _mm512_mul_ps(scales, broadcast(numbers + 4 * t)), out[t]);
            }
        }
        if constexpr (Pair::kHasMin) {
            const __m512 minima = pair.minima();
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) out[t] = _mm512_fmadd_ps(minima, broadcast(numbers + 4 * (T + t)), out[t]);
        }
        numbers += 4 * T * kFactors<Pair>;
    }
    float sums[T][2 * kPanelRows];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) _mm512_storeu_ps(sums[t], out[t]);
    for (int t = 0; t < T; ++t) {
        const int64_t row = tile.begin + t;
        finish(load(sums[t]), left.out + row * left.stride, left.bias, left.accumulate, left.width);
        finish(load(sums[t] + kPanelRows), right.out + row * right.stride, right.bias, right.accumulate, right.width);
    }
}

// Multiplies all tokens of a block with two panels. No tile has fewer than `MinTokens` tokens, so smaller ones are not compiled.
template <int MinTokens, int Blocks, typename Pair>
void run_wide_tiles(Pair pair, int64_t groups, const WideTokens& tokens, const PanelTarget& left, const PanelTarget& right) {
    for (int64_t index = 0; index < tokens.count; ++index) {
        const WideTile& tile = tokens.tiles[index];
        const auto run_sized = [&](auto n) FOREWORD_INLINE_LAMBDA {
            if constexpr (n.value >= MinTokens) {
                if (tile.count == n.value) run_wide_tile<n.value, Blocks>(pair, groups, left.blocks, tile, left, right);
            }
        };
        run_sized(Index<1>{}), run_sized(Index<2>{}), run_sized(Index<3>{}), run_sized(Index<4>{});
        run_sized(Index<5>{}), run_sized(Index<6>{}), run_sized(Index<7>{}), run_sized(Index<8>{});
    }
}

// Two neighbouring panels and where their outputs go.
struct PanelPair {
    PanelTarget left, right;
};

FOREWORD_INLINE PanelPair panel_pair(const MatrixView& w, int64_t panel, int64_t panel_begin, int64_t panel_end, const LinearOutput& out) {
    const PanelTarget left = panel_target(w, panel, panel_begin, out);
    PanelTarget right = left;
    right.width = 0;   // an odd number of panels: the last one is computed twice and stored once
    if (panel + 1 < panel_end) right = panel_target(w, panel + 1, panel_begin, out);
    return {left, right};
}

template <WeightFormat F>
void run_pair(const MatrixView& w, const WideTokens& tokens, int64_t count, const PanelTarget& left, const PanelTarget& right) {
    constexpr BlockLayout layout = block_layout(F);
    constexpr int Blocks = F == WeightFormat::Q8 ? 0 : 1;
    PackedPair<F> packed{{left.packed}, {right.packed}};
    if (count < kUnpackTokens) return run_wide_tiles<1, Blocks>(packed, w.groups, tokens, left, right);
    unpack_pair<F, false>(packed, 0, w.groups, left.blocks, tokens.unpacked);
    // All formats share the code of unpacked panels.
    run_wide_tiles<6, 0>(UnpackedPair<layout.scales, layout.has_min>{tokens.unpacked}, w.groups, tokens, left, right);
}

}  // namespace
