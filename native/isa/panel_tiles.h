// Products of a panel of eight output rows with a tile of tokens. An output is a sum over groups in the order of columns,
// whatever the size of the tile.
#pragma once

#include "../types.h"

namespace {

using namespace foreword;

constexpr int64_t kTokenTile = 4;     // tokens whose sums stay in registers
constexpr int64_t kCacheLine = 64;         // bytes of a cache line
constexpr int64_t kUnpackedHeader = 64; // bytes before a group's levels in an unpacked panel

template <WeightFormat F>
constexpr int kLines = static_cast<int>((block_layout(F).bytes + kCacheLine - 1) / kCacheLine);   // cache lines of 32 columns

// A compile-time integer as an argument of a lambda.
template <int N>
struct Index {
    static constexpr int value = N;
};
#define FOREWORD_INLINE_LAMBDA __attribute__((always_inline))

template <int T>
struct Sums {
    F32x8 tokens[T];
};

template <int Quad, bool Unsigned, int T>
FOREWORD_INLINE void dot_tile(I32x8 (&acc)[T], W32 w, const X32 (&x)[T]) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[t] = dot<Quad, Unsigned>(acc[t], w, x[t]);
}

// Adds the products of 32 columns. If these have two scales, the first 16 columns are added to acc[0], the others to acc[1].
template <typename Panel, int T>
FOREWORD_INLINE void dot_group(I32x8 (&acc)[Panel::kScales][T], const uint8_t* weights, const X32 (&x)[T]) {
    constexpr bool kUnsigned = Panel::kUnsigned;
    I32x8 (&first)[T] = acc[0], (&second)[T] = acc[Panel::kScales - 1];
    if constexpr (Panel::kBits < 8) {
        const auto vector = [&](auto j) FOREWORD_INLINE_LAMBDA {
            constexpr int J = decltype(j)::value;
            const WeightPair w = unpack_levels<Panel::kBits, Panel::kBias, J>(weights);
            dot_tile<J, kUnsigned>(first, w.low, x), dot_tile<J + 4, kUnsigned>(second, w.high, x);
        };
        vector(Index<0>{}), vector(Index<1>{}), vector(Index<2>{}), vector(Index<3>{});
    } else {
        dot_tile<0, kUnsigned>(first, load_weights(weights), x), dot_tile<1, kUnsigned>(first, load_weights(weights + 32), x);
        dot_tile<2, kUnsigned>(first, load_weights(weights + 64), x), dot_tile<3, kUnsigned>(first, load_weights(weights + 96), x);
        dot_tile<4, kUnsigned>(second, load_weights(weights + 128), x), dot_tile<5, kUnsigned>(second, load_weights(weights + 160), x);
        dot_tile<6, kUnsigned>(second, load_weights(weights + 192), x), dot_tile<7, kUnsigned>(second, load_weights(weights + 224), x);
    }
}

// Reads a panel as it is stored, group by group.
template <WeightFormat F>
struct PackedPanel {
    static constexpr BlockLayout kLayout = block_layout(F);
    static constexpr int kBits = kLayout.bits, kBias = kLayout.bias, kScales = kLayout.scales;
    static constexpr bool kUnsigned = kLayout.is_unsigned(), kHasMin = kLayout.has_min;
    static constexpr int64_t kBytes = kLayout.bytes;
    const uint8_t* weights;           // levels of the current group; at first the panel
    const uint8_t* header = nullptr;
    F32x8 scale = set1(0.0f), minimum = set1(0.0f);   // of a block of 256 columns (is_super)

    // Moves on to the header and the weights of group `g`; `weights` is where the previous group ends.
    FOREWORD_INLINE void enter(int64_t g) {
        if constexpr (kLayout.is_super) {
            if (g % kSuperGroups == 0) {
                scale = load_half(reinterpret_cast<const uint16_t*>(weights));
                minimum = load_half(reinterpret_cast<const uint16_t*>(weights + 16));
                header = weights + 16;
                weights += kSuperHeader;
            }
            header += 16;
        } else {
            header = weights;
            weights += kLayout.header;
        }
    }
    FOREWORD_INLINE F32x8 scales(int half) const {
        if constexpr (kLayout.is_super) return mul(scale, load_int8(header + 8 * half));
        return load_half(reinterpret_cast<const uint16_t*>(header));
    }
    FOREWORD_INLINE F32x8 minima() const {
        if constexpr (kLayout.is_super) return mul(minimum, load_int8(header + 8));
        if constexpr (kLayout.has_zeros) return mul(scales(0), load_int8(header + 16));
        return load_half(reinterpret_cast<const uint16_t*>(header + 16));
    }
};

// A panel whose levels were unpacked to bytes, for several token tiles: per group 8 scales, 8 minima or second scales, 256 levels.
// It is the same type for all formats with the same number of scales and minima, so that they share compiled tiles.
template <int Scales, bool HasMin>
struct UnpackedPanel {
    static constexpr int kBits = 8, kBias = 0, kScales = Scales;
    static constexpr bool kUnsigned = HasMin, kHasMin = HasMin;   // the formats with a minimum have unsigned levels
    static constexpr int64_t kBytes = 256;
    const uint8_t* weights;
    FOREWORD_INLINE void enter(int64_t) { weights += kUnpackedHeader; }
    FOREWORD_INLINE F32x8 scales(int half) const { return load(reinterpret_cast<const float*>(weights - kUnpackedHeader + 32 * half)); }
    FOREWORD_INLINE F32x8 minima() const { return load(reinterpret_cast<const float*>(weights - kUnpackedHeader + 32)); }
};

template <WeightFormat F>
void unpack_panel(const uint8_t* data, int64_t groups, uint8_t* out) {
    PackedPanel<F> panel{data};
    constexpr int Bits = PackedPanel<F>::kBits, Bias = PackedPanel<F>::kBias;
    for (int64_t g = 0; g < groups; ++g, panel.weights += panel.kBytes, out += kUnpackedHeader + 256) {
        panel.enter(g);
        store(reinterpret_cast<float*>(out), panel.scales(0));
        if constexpr (panel.kScales == 2) store(reinterpret_cast<float*>(out + 32), panel.scales(1));
        if constexpr (panel.kHasMin) store(reinterpret_cast<float*>(out + 32), panel.minima());
        const auto vector = [&](auto j) FOREWORD_INLINE_LAMBDA {
            constexpr int J = decltype(j)::value;
            const WeightPair w = unpack_levels<Bits, Bias, J>(panel.weights);
            store_weights(out + kUnpackedHeader + 32 * J, w.low);
            store_weights(out + kUnpackedHeader + 32 * (J + 4), w.high);
        };
        vector(Index<0>{}), vector(Index<1>{}), vector(Index<2>{}), vector(Index<3>{});
    }
}

// Prefetches `Lines` cache lines for every 32 columns of a tile: the memory at `next`, or if `next` is null, weights of the same
// panel kPrefetch bytes ahead. `Lines` is a template parameter, because a loop would cost more than the prefetch saves.
template <int Lines>
struct Prefetcher {
    const uint8_t* next;
    FOREWORD_INLINE void fetch(const uint8_t* weights) {
        const uint8_t* address = next ? next : weights + kPrefetch;
#pragma GCC unroll 4
        for (int i = 0; i < Lines; ++i) __builtin_prefetch(address + i * kCacheLine);
        if (next) next += Lines * kCacheLine;
    }
};

// Computes the integer sums of one group of `blocks` * 32 columns, and advances the panel to the end of the group.
template <typename Panel, int T, int Lines>
FOREWORD_INLINE void sum_group(I32x8 (&acc)[Panel::kScales][T], Panel& panel, const int8_t* q, int64_t stride, int64_t blocks,
                               Prefetcher<Lines>& prefetcher) {
#pragma GCC unroll 2
    for (int s = 0; s < Panel::kScales; ++s) {
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) acc[s][t] = zero_sums();
    }
    for (int64_t block = 0; block < blocks; ++block, panel.weights += Panel::kBytes, q += kBlock) {
        prefetcher.fetch(panel.weights);
        X32 tokens[T];
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) tokens[t] = load_tokens(q + t * stride);
        dot_group<Panel, T>(acc, panel.weights, tokens);
    }
}

// Computes eight outputs of T tokens from token `first` on. A group has `Blocks` blocks of 32 columns, or `any_blocks` if that is 0.
template <int T, int Blocks, typename Panel, int Lines>
FOREWORD_INLINE Sums<T> quantized_tile(Panel panel, const ActivationView& x, int64_t first, int64_t any_blocks,
                                       Prefetcher<Lines> prefetcher) {
    const int64_t groups = x.groups, blocks = Blocks > 0 ? Blocks : any_blocks;
    const int64_t width = blocks * kBlock, stride = groups * width;
    const int8_t* q = x.q + first * stride;
    const float* scale = x.scale + first * groups;
    const float* sum = x.sum + first * groups;
    Sums<T> out;
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) out.tokens[t] = set1(0.0f);
    for (int64_t g = 0; g < groups; ++g) {
        panel.enter(g);
        I32x8 acc[Panel::kScales][T];
        F32x8 scales[Panel::kScales];
#pragma GCC unroll 2
        for (int s = 0; s < Panel::kScales; ++s) scales[s] = panel.scales(s);
        const F32x8 minima = Panel::kHasMin ? panel.minima() : set1(0.0f);
        sum_group<Panel, T>(acc, panel, q + g * width, stride, blocks, prefetcher);
#pragma GCC unroll 2
        for (int s = 0; s < Panel::kScales; ++s) {
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                out.tokens[t] = fma(to_float(acc[s][t]), mul(scales[s], scale[t * groups + g]), out.tokens[t]);
            }
        }
        if constexpr (Panel::kHasMin) {
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) out.tokens[t] = fma(minima, sum[t * groups + g], out.tokens[t]);
        }
    }
    return out;
}

struct FloatPanel {
    const uint8_t* data;
};

template <int T>
FOREWORD_INLINE Sums<T> float_tile(const float* panel, const ActivationView& x, int64_t first) {
    const float* rows = x.f32 + first * x.cols;
    Sums<T> out;
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) out.tokens[t] = set1(0.0f);
    for (int64_t c = 0; c < x.cols; ++c) {
        const F32x8 w = load(panel + c * kPanelRows);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) out.tokens[t] = fma(w, rows[t * x.cols + c], out.tokens[t]);
    }
    return out;
}

// Adds the bias and, if `accumulate`, the values at `out`, and stores the first `width` of eight outputs.
__attribute__((noinline)) void finish(F32x8 sums, float* out, const float* bias, bool accumulate, int64_t width) {
    if (width == kPanelRows) {
        if (bias) sums = add(sums, load(bias));
        if (accumulate) sums = add(load(out), sums);
        store(out, sums);
        return;
    }
    float lanes[kPanelRows];
    store(lanes, sums);
    for (int64_t i = 0; i < width; ++i) {
        const float value = bias ? lanes[i] + bias[i] : lanes[i];
        out[i] = accumulate ? out[i] + value : value;
    }
}

// A panel and the eight columns of the result that it computes.
struct PanelTarget {
    float* out;               // of the first token
    const float* bias;        // or null
    int64_t stride;           // of `out`, between tokens
    int64_t width;            // columns that exist
    int64_t blocks;           // of 32 columns in a group
    const uint8_t* packed;    // the panel as it is stored
    int64_t packed_bytes;
    bool accumulate;
};

FOREWORD_INLINE PanelTarget panel_target(const MatrixView& w, int64_t panel, int64_t panel_begin, const LinearOutput& out) {
    const int64_t row = panel * kPanelRows, remaining_rows = w.rows - row;
    return {out.out + (panel - panel_begin) * kPanelRows, out.bias ? out.bias + row : nullptr, out.stride,
            remaining_rows < kPanelRows ? remaining_rows : kPanelRows, w.grouping.group_size / kBlock, w.data + panel * w.panel_bytes, w.panel_bytes,
            out.accumulate};
}

template <int T, int Blocks, typename Panel, int Lines>
__attribute__((noinline)) void run_tile(Panel panel, const ActivationView& x, int64_t first, const PanelTarget& target,
                                        Prefetcher<Lines> prefetcher) {
    Sums<T> sums;
    if constexpr (__is_same(Panel, FloatPanel)) {
        sums = float_tile<T>(reinterpret_cast<const float*>(panel.data), x, first);
    } else {
        sums = quantized_tile<T, Blocks>(panel, x, first, target.blocks, prefetcher);
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
        float* out = target.out + (first + t) * target.stride;
        finish(sums.tokens[t], out, target.bias, target.accumulate, target.width);
    }
}

template <int Blocks, int Lines, typename Panel>
FOREWORD_INLINE void run_sized_tile(int64_t size, Panel panel, const ActivationView& x, int64_t first, const PanelTarget& target,
                                    const uint8_t* next) {
    const Prefetcher<Lines> prefetcher{next};
    switch (size) {
        case 1: return run_tile<1, Blocks>(panel, x, first, target, prefetcher);
        case 2: return run_tile<2, Blocks>(panel, x, first, target, prefetcher);
        case 3: return run_tile<3, Blocks>(panel, x, first, target, prefetcher);
        default: return run_tile<4, Blocks>(panel, x, first, target, prefetcher);
    }
}

// Multiplies the tokens [begin, end) with one panel, in tiles of nearly equal size. A single tile prefetches its own weights; of
// several tiles, each prefetches one half of the next panel, so that none of them waits for memory. `Lines` is the number of
// cache lines of 32 columns.
template <int Blocks, int Lines, typename Panel>
void run_tiles(Panel panel, const ActivationView& x, int64_t begin, int64_t end, const PanelTarget& target) {
    constexpr int kAllLines = kFetches ? Lines : 0, kHalfLines = (kAllLines + 1) / 2;
    const int64_t tiles = (end - begin + kTokenTile - 1) / kTokenTile;
    if (tiles == 1) {
        return run_sized_tile<Blocks, kAllLines>(end - begin, panel, x, begin, target, nullptr);
    }
    const uint8_t* next = target.packed + target.packed_bytes;
    int64_t first = begin;
    for (int64_t index = 0; index < tiles; ++index) {
        const int64_t size = (end - first + tiles - index - 1) / (tiles - index);
        run_sized_tile<Blocks, kHalfLines>(size, panel, x, first, target, next + index % 2 * (target.packed_bytes / 2));
        first += size;
    }
}

template <WeightFormat F>
void run_panel(const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, const PanelTarget& target,
               uint8_t* scratch) {
    const uint8_t* panel = target.packed;
    if constexpr (F == WeightFormat::F32) {
        run_tiles<1, 0>(FloatPanel{panel}, x, begin, end, target);
    } else if constexpr (F == WeightFormat::Q8) {
        if (target.blocks == 1) return run_tiles<1, kLines<F>>(PackedPanel<F>{panel}, x, begin, end, target);
        run_tiles<0, kLines<F>>(PackedPanel<F>{panel}, x, begin, end, target);
    } else if (end - begin <= kTokenTile) {
        run_tiles<1, kLines<F>>(PackedPanel<F>{panel}, x, begin, end, target);
    } else {
        unpack_panel<F>(panel, w.groups, scratch);
        run_tiles<1, kLines<F>>(UnpackedPanel<block_layout(F).scales, block_layout(F).has_min>{scratch}, x, begin, end, target);
    }
}

}  // namespace
