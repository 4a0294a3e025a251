// Element-wise kernels, norms, quantisation and rotations. The last elements of a row are padded to a vector, so that a result
// does not depend on the lane in which it is computed.
#pragma once

#include "../types.h"
#include "panel_tiles.h"

namespace {

using namespace foreword;

// Loads eight floats of which the first `count` exist; the others are zero.
FOREWORD_INLINE F32x8 load_part(const float* p, int64_t count) {
    if (count >= 8) return load(p);
    float lanes[8] = {0};
    for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
    return load(lanes);
}

FOREWORD_INLINE void store_part(float* p, F32x8 a, int64_t count) {
    if (count >= 8) return store(p, a);
    float lanes[8];
    store(lanes, a);
    for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

// e^x to about one unit in the last place, for x clamped to [-87, 88].
FOREWORD_INLINE F32x8 exponential(F32x8 x) {
    x = min(max(x, set1(-87.0f)), set1(88.0f));
    const Power two = nearest_power(mul(x, 1.44269504f));
    F32x8 r = fma(two.exponent, -0.693145752f, x);   // ln 2 in two parts
    r = fma(two.exponent, -1.42860677e-6f, r);
    F32x8 p = set1(1.38888889e-3f);
    p = fma(p, r, set1(8.33333377e-3f));
    p = fma(p, r, set1(4.16666679e-2f));
    p = fma(p, r, set1(1.66666672e-1f));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return mul(p, two.value);
}

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
    F32x8 squares = set1(0.0f);
    for (int64_t i = 0; i < n; i += 8) {
        const F32x8 v = load_part(x + i, n - i);
        squares = fma(v, v, squares);
    }
    const float factor = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(n) + eps);
    for (int64_t i = 0; i < n; i += 8) {
        const F32x8 v = mul(load_part(x + i, n - i), factor);
        store_part(out + i, mul(v, load_part(weight + i, n - i)), n - i);
    }
}

// Quantises a group of `size` values, a multiple of 32. The maximum, the NaN check and the sum of the levels, which are
// integers, do not depend on the order. So four accumulators of each are used, which do not wait for one another.
FOREWORD_INLINE void quantize_group(const float* x, int64_t size, int8_t* q, float* scale, float* sum) {
    constexpr int kAccumulators = 4;
    F32x8 largest[kAccumulators], nan_check[kAccumulators], total[kAccumulators];
#pragma GCC unroll 4
    for (int k = 0; k < kAccumulators; ++k) largest[k] = nan_check[k] = total[k] = set1(0.0f);
    for (int64_t i = 0; i < size; i += 8 * kAccumulators) {
#pragma GCC unroll 4
        for (int k = 0; k < kAccumulators; ++k) {
            const F32x8 v = load(x + i + 8 * k);
            largest[k] = max(largest[k], abs(v));
            nan_check[k] = fma(v, 0.0f, nan_check[k]);   // NaN if v is NaN or infinite, else 0
        }
    }
    const float maximum = max_lanes(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
    const float inverse = maximum > 0.0f ? 127.0f / maximum : 0.0f;
    for (int64_t i = 0; i < size; i += 8 * kAccumulators) {
#pragma GCC unroll 4
        for (int k = 0; k < kAccumulators; ++k) {
            const F32x8 level = round(mul(load(x + i + 8 * k), inverse));
            store_int8(q + i + 8 * k, level);
            total[k] = add(total[k], level);
        }
    }
    *scale = maximum / 127.0f + sum_lanes(add(add(nan_check[0], nan_check[1]), add(nan_check[2], nan_check[3])));
    *sum = *scale * sum_lanes(add(add(total[0], total[1]), add(total[2], total[3])));
}

// Multiplies eight vectors, lane by lane, with the Hadamard matrix H of size eight.
FOREWORD_INLINE void hadamard_eight(F32x8 (&v)[8]) {
#pragma GCC unroll 3
    for (int span = 1; span < 8; span *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            if (i & span) continue;
            const F32x8 a = v[i], b = v[i + span];
            v[i] = add(a, b);
            v[i + span] = sub(a, b);
        }
    }
}

// Rotates a block of 64 values: read as a matrix X of 8 x 8 it becomes H X^T H / 8. The map is orthonormal and its own inverse.
FOREWORD_INLINE void rotate_block(const float* x, float* out) {
    F32x8 v[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) v[i] = load(x + 8 * i);
    hadamard_eight(v);
    transpose(v);
    hadamard_eight(v);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) store(out + 8 * i, mul(v[i], 0.125f));
}

void rotate_blocks(float* x, int64_t blocks) {
    for (int64_t block = 0; block < blocks; ++block) rotate_block(x + block * kRotation, x + block * kRotation);
}

void quantize(const float* x, int64_t n, const Grouping& grouping, int8_t* q, float* scale, float* sum) {
    const int64_t group_size = grouping.group_size;
    for (int64_t g = 0; g * group_size < n; ++g) {
        const int64_t begin = g * group_size;
        const int64_t count = n - begin < group_size ? n - begin : group_size;
        const float* values = x + begin;
        float padded[kMaxGroup], rotated[kMaxGroup];
        if (count < group_size) {
            __builtin_memcpy(padded, values, static_cast<size_t>(count) * sizeof(float));
            __builtin_memset(padded + count, 0, static_cast<size_t>(group_size - count) * sizeof(float));
            values = padded;
        }
        if (grouping.is_rotated) {
            for (int64_t i = 0; i < group_size; i += kRotation) rotate_block(values + i, rotated + i);
            values = rotated;
        }
        quantize_group(values, group_size, q + begin, scale + g, sum + g);
    }
}

FOREWORD_INLINE F32x8 silu(F32x8 x) { return div(x, add(set1(1.0f), exponential(sub(set1(0.0f), x)))); }

// GELU in the tanh approximation, written with the sigmoid: x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
FOREWORD_INLINE F32x8 gelu(F32x8 x) {
    const F32x8 cubic = mul(mul(mul(x, x), x), 0.044715f);
    return div(x, add(set1(1.0f), exponential(mul(add(x, cubic), -2.0f * 0.79788456f))));
}

template <F32x8 (*Activation)(F32x8)>
FOREWORD_INLINE void activate_mul(float* gate, const float* up, int64_t n) {
    int64_t i = 0;
#pragma GCC unroll 2
    for (; i + 8 <= n; i += 8) store(gate + i, mul(Activation(load(gate + i)), load(up + i)));
    if (i < n) store_part(gate + i, mul(Activation(load_part(gate + i, n - i)), load_part(up + i, n - i)), n - i);
}

void silu_mul(float* gate, const float* up, int64_t n) {
    activate_mul<silu>(gate, up, n);
}

void gelu_mul(float* gate, const float* up, int64_t n) {
    activate_mul<gelu>(gate, up, n);
}

void sigmoid_mul(float* x, const float* gate, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        const F32x8 denominator = add(set1(1.0f), exponential(sub(set1(0.0f), load_part(gate + i, n - i))));
        store_part(x + i, div(load_part(x + i, n - i), denominator), n - i);
    }
}

void squared_relu(float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        const F32x8 value = load_part(x + i, n - i), positive = max(value, set1(0.0f));
        store_part(x + i, add(mul(positive, positive), sub(value, value)), n - i);   // the difference is NaN if the value is
    }
}

void clamped_mul(float* gate, const float* up, float limit, float slope, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        const F32x8 clamped_gate = min(load_part(gate + i, n - i), set1(limit));
        const F32x8 clamped_up = max(min(load_part(up + i, n - i), set1(limit)), set1(-limit));
        const F32x8 active = div(clamped_gate, add(set1(1.0f), exponential(mul(clamped_gate, -slope))));
        store_part(gate + i, mul(add(clamped_up, set1(1.0f)), active), n - i);
    }
}

// cap * tanh(x / cap). `exponential` clamps NaN away, so x - x restores it.
FOREWORD_INLINE F32x8 softcapped(F32x8 x, float cap) {
    const F32x8 power = exponential(mul(x, 2.0f / cap));
    const F32x8 tanh = sub(set1(1.0f), div(set1(2.0f), add(power, set1(1.0f))));
    return add(mul(tanh, cap), sub(x, x));
}

void softcap(float* x, float cap, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) store_part(x + i, softcapped(load_part(x + i, n - i), cap), n - i);
}

void rotate(float* head, const float* cos, const float* sin, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += 8) {
        const int64_t count = half - i;
        const F32x8 a = load_part(head + i, count), b = load_part(head + half + i, count);
        const F32x8 c = load_part(cos + i, count), s = load_part(sin + i, count);
        store_part(head + i, sub(mul(a, c), mul(b, s)), count);
        store_part(head + half + i, add(mul(b, c), mul(a, s)), count);
    }
}

// Returns the level of row `r` and column `c` of a panel's group, minus the bias.
template <WeightFormat F>
FOREWORD_INLINE int weight_at(const uint8_t* weights, int64_t r, int64_t c) {
    constexpr BlockLayout layout = block_layout(F);
    const int64_t byte = r * 4 + c % 4, quad = c / 4;
    if constexpr (layout.bits == 8) return static_cast<int8_t>(weights[quad * 32 + byte]);
    int level = weights[quad % 4 * 32 + byte] >> (c < 16 ? 0 : 4) & 15;
    if constexpr (layout.bits == 5) level |= (weights[128 + byte] >> quad & 1) << 4;
    if constexpr (layout.bits == 6) level |= (weights[128 + quad / 4 * 32 + byte] >> quad % 4 * 2 & 3) << 4;
    return level - layout.bias;
}

template <WeightFormat F>
void dequantize_blocks(const MatrixView& w, int64_t row, float* out) {
    const int64_t lane = row % kPanelRows, group_size = w.grouping.group_size;
    PackedPanel<F> panel{w.data + row / kPanelRows * w.panel_bytes};
    for (int64_t g = 0; g < w.groups; ++g, panel.weights += group_size / kBlock * panel.kBytes) {
        panel.enter(g);
        float scales[2][kPanelRows], minima[kPanelRows] = {0}, values[kMaxGroup];
        for (int s = 0; s < panel.kScales; ++s) store(scales[s], panel.scales(s));
        if constexpr (panel.kHasMin) store(minima, panel.minima());
        for (int64_t c = 0; c < group_size; ++c) {
            const int64_t half = panel.kScales == 2 ? c / 16 : 0;
            values[c] = scales[half][lane] * static_cast<float>(weight_at<F>(panel.weights, lane, c)) + minima[lane];
        }
        if (w.grouping.is_rotated) rotate_blocks(values, group_size / kRotation);
        const int64_t begin = g * group_size, count = w.cols - begin < group_size ? w.cols - begin : group_size;
        __builtin_memcpy(out + begin, values, static_cast<size_t>(count) * sizeof(float));
    }
}

void dequantize_row(const MatrixView& w, int64_t row, float* out) {
    switch (w.format) {
        case WeightFormat::F32: {
            const float* panel = reinterpret_cast<const float*>(w.data + row / kPanelRows * w.panel_bytes);
            for (int64_t c = 0; c < w.cols; ++c) out[c] = panel[c * kPanelRows + row % kPanelRows];
            return;
        }
        case WeightFormat::Q8: return dequantize_blocks<WeightFormat::Q8>(w, row, out);
        case WeightFormat::Q4_0: return dequantize_blocks<WeightFormat::Q4_0>(w, row, out);
        case WeightFormat::Q4_1: return dequantize_blocks<WeightFormat::Q4_1>(w, row, out);
        case WeightFormat::Q5_0: return dequantize_blocks<WeightFormat::Q5_0>(w, row, out);
        case WeightFormat::Q5_1: return dequantize_blocks<WeightFormat::Q5_1>(w, row, out);
        case WeightFormat::Q4_K: return dequantize_blocks<WeightFormat::Q4_K>(w, row, out);
        case WeightFormat::Q5_K: return dequantize_blocks<WeightFormat::Q5_K>(w, row, out);
        case WeightFormat::Q6_K: return dequantize_blocks<WeightFormat::Q6_K>(w, row, out);
        case WeightFormat::Q4_Z: return dequantize_blocks<WeightFormat::Q4_Z>(w, row, out);
        case WeightFormat::Factor: {
            const uint8_t* panel = w.data + row / kPanelRows * w.panel_bytes;
            const int64_t lane = row % kPanelRows;
            const float scale = reinterpret_cast<const float*>(panel)[lane];
            const int8_t* weights = reinterpret_cast<const int8_t*>(panel) + kFactorHeader + 4 * lane;
            for (int64_t c = 0; c < w.cols; ++c) out[c] = scale * static_cast<float>(weights[c / 4 * 4 * kPanelRows + c % 4]);
            return;
        }
    }
}

}  // namespace
