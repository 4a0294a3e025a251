// Products of a panel of eight output rows with a tile of tokens. One output is a sum over groups in column order,
// whatever tile computes it.
#pragma once

#include "../types.h"

namespace {

using namespace foreword;

constexpr int64_t kTokenTile = 4;     // tokens whose sums stay in registers
constexpr int64_t kPrefetch = 1536;   // bytes ahead in the weight stream, when every byte is used once
constexpr int64_t kLine = 64;         // bytes of a cache line

// What one group of a panel looks like: a header with scales, then `bytes` for every 32 columns.
template <Form F>
struct Block;
template <>
struct Block<Form::Q8> {
    static constexpr bool has_min = false, nibbles = false, is_unsigned = false;
    static constexpr int bias = 0;
    static constexpr int64_t header = 16, bytes = 256;
};
template <>
struct Block<Form::Q4_0> {
    static constexpr bool has_min = false, nibbles = true, is_unsigned = false;
    static constexpr int bias = 8;
    static constexpr int64_t header = 16, bytes = 128;
};
template <>
struct Block<Form::Q4_1> {
    static constexpr bool has_min = true, nibbles = true, is_unsigned = true;
    static constexpr int bias = 0;
    static constexpr int64_t header = 32, bytes = 128;
};

template <Form F>
constexpr int kLines = static_cast<int>(Block<F>::bytes / kLine);   // cache lines of 32 columns

template <int T>
struct Sums {
    F32x8 of[T];
};

template <int Quad, bool Unsigned, int T>
FOREWORD_INLINE void dot_tile(I32x8 (&acc)[T], W32 w, const X32 (&x)[T]) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[t] = dot<Quad, Unsigned>(acc[t], w, x[t]);
}

template <typename B, int T>
FOREWORD_INLINE void dot_group(I32x8 (&acc)[T], const uint8_t* weights, const X32 (&x)[T]) {
    constexpr bool U = B::is_unsigned;
    if constexpr (B::nibbles) {
        WeightPair w = unpack_nibbles<B::bias>(weights);
        dot_tile<0, U>(acc, w.low, x), dot_tile<4, U>(acc, w.high, x);
        w = unpack_nibbles<B::bias>(weights + 32);
        dot_tile<1, U>(acc, w.low, x), dot_tile<5, U>(acc, w.high, x);
        w = unpack_nibbles<B::bias>(weights + 64);
        dot_tile<2, U>(acc, w.low, x), dot_tile<6, U>(acc, w.high, x);
        w = unpack_nibbles<B::bias>(weights + 96);
        dot_tile<3, U>(acc, w.low, x), dot_tile<7, U>(acc, w.high, x);
    } else {
        dot_tile<0, U>(acc, load_weights(weights), x), dot_tile<1, U>(acc, load_weights(weights + 32), x);
        dot_tile<2, U>(acc, load_weights(weights + 64), x), dot_tile<3, U>(acc, load_weights(weights + 96), x);
        dot_tile<4, U>(acc, load_weights(weights + 128), x), dot_tile<5, U>(acc, load_weights(weights + 160), x);
        dot_tile<6, U>(acc, load_weights(weights + 192), x), dot_tile<7, U>(acc, load_weights(weights + 224), x);
    }
}

// Reads a panel in its packed form.
template <Form F>
struct PackedPanel {
    using B = Block<F>;
    const uint8_t* data;
    FOREWORD_INLINE F32x8 scales() const { return load_half(reinterpret_cast<const uint16_t*>(data)); }
    FOREWORD_INLINE F32x8 minima() const { return load_half(reinterpret_cast<const uint16_t*>(data + 16)); }
};

// A panel of 4-bit weights spread to bytes once, for several token tiles: per group 8 scales, 8 minima, 256 bytes.
template <Form F>
struct SpreadBlock {
    static constexpr bool has_min = Block<F>::has_min, nibbles = false, is_unsigned = Block<F>::is_unsigned;
    static constexpr int bias = 0;
    static constexpr int64_t header = 64, bytes = 256;
};

template <Form F>
struct SpreadPanel {
    using B = SpreadBlock<F>;
    const uint8_t* data;
    FOREWORD_INLINE F32x8 scales() const { return load(reinterpret_cast<const float*>(data)); }
    FOREWORD_INLINE F32x8 minima() const { return load(reinterpret_cast<const float*>(data + 32)); }
};

template <Form F>
void spread_panel(const uint8_t* panel, int64_t groups, uint8_t* out) {
    using B = Block<F>;
    using S = SpreadBlock<F>;
    for (int64_t g = 0; g < groups; ++g, panel += B::header + B::bytes, out += S::header + S::bytes) {
        const PackedPanel<F> packed{panel};
        store(reinterpret_cast<float*>(out), packed.scales());
        if constexpr (B::has_min) store(reinterpret_cast<float*>(out + 32), packed.minima());
        for (int64_t j = 0; j < 4; ++j) {
            const WeightPair w = unpack_nibbles<B::bias>(panel + B::header + 32 * j);
            store_weights(out + S::header + 32 * j, w.low);
            store_weights(out + S::header + 32 * (j + 4), w.high);
        }
    }
}

// The memory to fetch while a tile is computed, so many lines for every 32 columns: a number that the compiler knows, as
// a loop around each fetch would cost more than waiting for it.
template <int Lines>
struct Ahead {
    const uint8_t* next;
    FOREWORD_INLINE void fetch() {
#pragma GCC unroll 4
        for (int i = 0; i < Lines; ++i) __builtin_prefetch(next + i * kLine);
        next += Lines * kLine;
    }
};

// Integer sums of one group of `blocks` times 32 columns.
template <typename B, int T, int Lines>
FOREWORD_INLINE void sum_group(I32x8 (&acc)[T], const uint8_t* weights, const int8_t* q, int64_t stride, int64_t blocks,
                               Ahead<Lines>& ahead) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[t] = zero_sums();
    for (int64_t block = 0; block < blocks; ++block, weights += B::bytes, q += kBlock) {
        ahead.fetch();
        X32 tokens[T];
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) tokens[t] = load_tokens(q + t * stride);
        dot_group<B, T>(acc, weights, tokens);
    }
}

// Eight outputs of T tokens, beginning with token `first`. Blocks > 0 fixes the 32-column blocks of a group.
template <int T, int Blocks, typename Panel, int Lines>
FOREWORD_INLINE Sums<T> quantized_tile(Panel panel, const ActivationView& x, int64_t first, int64_t any_blocks,
                                       Ahead<Lines> ahead) {
    using B = typename Panel::B;
    const int64_t groups = x.groups, blocks = Blocks > 0 ? Blocks : any_blocks;
    const int64_t width = blocks * kBlock, stride = groups * width;
    const int8_t* q = x.q + first * stride;
    const float* scale = x.scale + first * groups;
    const float* sum = x.sum + first * groups;
    Sums<T> out;
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) out.of[t] = set1(0.0f);
    for (int64_t g = 0; g < groups; ++g, panel.data += B::header + blocks * B::bytes) {
        I32x8 acc[T];
        sum_group<B, T>(acc, panel.data + B::header, q + g * width, stride, blocks, ahead);
        const F32x8 scales = panel.scales();
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            out.of[t] = fma(to_float(acc[t]), mul(scales, scale[t * groups + g]), out.of[t]);
        }
        if constexpr (B::has_min) {
            const F32x8 minima = panel.minima();
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) out.of[t] = fma(minima, sum[t * groups + g], out.of[t]);
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
    for (int t = 0; t < T; ++t) out.of[t] = set1(0.0f);
    for (int64_t c = 0; c < x.cols; ++c) {
        const F32x8 w = load(panel + c * kPanelRows);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) out.of[t] = fma(w, rows[t * x.cols + c], out.of[t]);
    }
    return out;
}

// Adds bias and residual and stores the `width` columns of a panel that exist.
inline void finish(F32x8 sums, float* out, const float* bias, bool accumulate, int64_t width) {
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

// The panel and the columns of the result that it fills.
struct PanelTarget {
    float* out;
    const float* bias;
    int64_t stride;
    int64_t width;
    int64_t blocks;           // of 32 columns in a group
    const uint8_t* packed;    // the panel as it is stored
    int64_t packed_bytes;
    bool accumulate;
};

template <int T, int Blocks, typename Panel, int Lines>
__attribute__((noinline)) void run_tile(Panel panel, const ActivationView& x, int64_t first, const PanelTarget& target,
                                        Ahead<Lines> ahead) {
    Sums<T> sums;
    if constexpr (__is_same(Panel, FloatPanel)) {
        sums = float_tile<T>(reinterpret_cast<const float*>(panel.data), x, first);
    } else {
        sums = quantized_tile<T, Blocks>(panel, x, first, target.blocks, ahead);
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
        float* out = target.out + (first + t) * target.stride;
        finish(sums.of[t], out, target.bias, target.accumulate, target.width);
    }
}

template <int Blocks, int Lines, typename Panel>
FOREWORD_INLINE void run_sized_tile(int64_t size, Panel panel, const ActivationView& x, int64_t first, const PanelTarget& target,
                                    const uint8_t* next) {
    const Ahead<Lines> ahead{next};
    switch (size) {
        case 1: return run_tile<1, Blocks>(panel, x, first, target, ahead);
        case 2: return run_tile<2, Blocks>(panel, x, first, target, ahead);
        case 3: return run_tile<3, Blocks>(panel, x, first, target, ahead);
        default: return run_tile<4, Blocks>(panel, x, first, target, ahead);
    }
}

// All tokens [begin, end) through one panel, in tiles of nearly equal size. A single tile uses every byte once and
// fetches its own a little ahead; of several, each fetches one half of the next panel, so that none of them waits for
// memory. `Lines` are those of 32 columns.
template <int Blocks, int Lines, typename Panel>
void run_tiles(Panel panel, const ActivationView& x, int64_t begin, int64_t end, const PanelTarget& target) {
    constexpr int kWhole = kFetches ? Lines : 0, kHalf = kWhole / 2;
    const int64_t tiles = (end - begin + kTokenTile - 1) / kTokenTile;
    if (tiles == 1) {
        return run_sized_tile<Blocks, kWhole>(end - begin, panel, x, begin, target, target.packed + kPrefetch);
    }
    const uint8_t* next = target.packed + target.packed_bytes;
    int64_t first = begin;
    for (int64_t index = 0; index < tiles; ++index) {
        const int64_t size = (end - first + tiles - index - 1) / (tiles - index);
        run_sized_tile<Blocks, kHalf>(size, panel, x, first, target, next + index % 2 * (target.packed_bytes / 2));
        first += size;
    }
}

template <Form F>
void run_panel(const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, const PanelTarget& target,
               uint8_t* scratch) {
    const uint8_t* panel = target.packed;
    if constexpr (F == Form::F32) {
        run_tiles<1, 0>(FloatPanel{panel}, x, begin, end, target);
    } else if constexpr (F == Form::Q8) {
        if (target.blocks == 1) return run_tiles<1, kLines<F>>(PackedPanel<F>{panel}, x, begin, end, target);
        run_tiles<0, kLines<F>>(PackedPanel<F>{panel}, x, begin, end, target);
    } else if (end - begin <= kTokenTile) {
        run_tiles<1, kLines<F>>(PackedPanel<F>{panel}, x, begin, end, target);
    } else {
        spread_panel<F>(panel, w.groups, scratch);
        run_tiles<1, kLines<F>>(SpreadPanel<F>{scratch}, x, begin, end, target);
    }
}

}  // namespace
