// Eight-lane vectors in plain C++, for all other CPUs. The order of operations is that of the other instruction sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../half.h"

namespace {

#define FOREWORD_INLINE inline __attribute__((always_inline))
#define FOREWORD_LANES for (int i = 0; i < 8; ++i)

// Whether prefetching saves time; not here, where everything else is slow.
constexpr bool kFetches = false;
constexpr int64_t kPrefetch = 1536;   // bytes to prefetch ahead, where every weight is read once

struct F32x8 {
    float v[8];
};

// a * b + c, with one rounding if the hardware has such an instruction; libm's fmaf would be a hundred times slower.
FOREWORD_INLINE float fused(float a, float b, float c) {
#if defined(__FP_FAST_FMAF) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

template <typename Operation>
FOREWORD_INLINE F32x8 each(Operation operation) {
    F32x8 r;
    FOREWORD_LANES r.v[i] = operation(i);
    return r;
}

FOREWORD_INLINE F32x8 load(const float* p) {
    return each([&](int i) { return p[i]; });
}
FOREWORD_INLINE void store(float* p, const F32x8& a) { FOREWORD_LANES p[i] = a.v[i]; }
FOREWORD_INLINE F32x8 set1(float x) {
    return each([&](int) { return x; });
}
FOREWORD_INLINE F32x8 add(const F32x8& a, const F32x8& b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
FOREWORD_INLINE F32x8 sub(const F32x8& a, const F32x8& b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
FOREWORD_INLINE F32x8 mul(const F32x8& a, const F32x8& b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
FOREWORD_INLINE F32x8 mul(const F32x8& a, float b) { return mul(a, set1(b)); }
FOREWORD_INLINE F32x8 div(const F32x8& a, const F32x8& b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
FOREWORD_INLINE F32x8 max(const F32x8& a, const F32x8& b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
FOREWORD_INLINE F32x8 min(const F32x8& a, const F32x8& b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
FOREWORD_INLINE F32x8 abs(const F32x8& a) {
    return each([&](int i) { return __builtin_fabsf(a.v[i]); });
}
FOREWORD_INLINE F32x8 fma(const F32x8& a, const F32x8& b, const F32x8& c) {
    return each([&](int i) { return fused(a.v[i], b.v[i], c.v[i]); });
}
FOREWORD_INLINE F32x8 fma(const F32x8& a, float b, const F32x8& c) { return fma(a, set1(b), c); }
// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even, for |x| < 2^22.
FOREWORD_INLINE F32x8 round(const F32x8& a) {
    return each([&](int i) { return (a.v[i] + 12582912.0f) - 12582912.0f; });
}
// The integer n nearest to x, and 2^n, for n in [-126, 127]. The low bits of the sum with 1.5 * 2^23 are n.
struct Power {
    F32x8 exponent, value;   // n, 2^n
};
FOREWORD_INLINE Power nearest_power(const F32x8& x) {
    const F32x8 offset = set1(12582912.0f), rounded = add(x, offset);
    const F32x8 value = each([&](int i) {
        uint32_t bits;
        std::memcpy(&bits, &rounded.v[i], 4);
        bits = (bits << 23) + 0x3F800000u;   // adds the bits of 1.0
        float power;
        std::memcpy(&power, &bits, 4);
        return power;
    });
    return {sub(rounded, offset), value};
}
FOREWORD_INLINE float sum_lanes(const F32x8& a) {
    float four[4];
    for (int i = 0; i < 4; ++i) four[i] = a.v[i] + a.v[i + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}
FOREWORD_INLINE float max_lanes(const F32x8& a) {
    float top = a.v[0];
    for (int i = 1; i < 8; ++i) top = a.v[i] > top ? a.v[i] : top;
    return top;
}
FOREWORD_INLINE F32x8 load_half(const uint16_t* p) {
    return each([&](int i) { return half_to_float(p[i]); });
}
FOREWORD_INLINE F32x8 load(const BFloat* p) {
    return each([&](int i) { return to_float(p[i]); });
}
FOREWORD_INLINE F32x8 load_int8(const uint8_t* p) {
    return each([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}
FOREWORD_INLINE void store_int8(int8_t* p, const F32x8& a) {
    const F32x8 bounded = max(min(a, set1(127.0f)), set1(-127.0f));
    FOREWORD_LANES p[i] = static_cast<int8_t>(bounded.v[i] == bounded.v[i] ? bounded.v[i] : 0.0f);
}
FOREWORD_INLINE void transpose(F32x8 (&v)[8]) {
    for (int row = 0; row < 8; ++row) {
        for (int i = 0; i < row; ++i) {
            const float value = v[row].v[i];
            v[row].v[i] = v[i].v[row];
            v[i].v[row] = value;
        }
    }
}

struct W32 {
    int8_t v[32];   // 8 rows x 4 columns
};
struct WeightPair {
    W32 low, high;
};
struct X32 {
    const int8_t* v;
};
struct I32x8 {
    int32_t v[8];
};

FOREWORD_INLINE W32 load_weights(const uint8_t* p) {
    W32 w;
    std::memcpy(w.v, p, sizeof w.v);
    return w;
}
FOREWORD_INLINE void store_weights(uint8_t* p, const W32& w) { std::memcpy(p, w.v, sizeof w.v); }
// Unpacks the columns 4J..4J+3 (low) and 16+4J..16+4J+3 (high) of 8 rows x 32 columns with 4, 5 or 6 bits.
template <int Bits, int Bias, int J>
FOREWORD_INLINE WeightPair unpack_levels(const uint8_t* p) {
    WeightPair pair;
    for (int i = 0; i < 32; ++i) {
        int low = p[32 * J + i] & 15, high = p[32 * J + i] >> 4;
        if constexpr (Bits == 5) {
            low |= (p[128 + i] >> J & 1) << 4;
            high |= (p[128 + i] >> (J + 4) & 1) << 4;
        } else if constexpr (Bits == 6) {
            low |= (p[128 + i] >> 2 * J & 3) << 4;
            high |= (p[160 + i] >> 2 * J & 3) << 4;
        }
        pair.low.v[i] = static_cast<int8_t>(low - Bias);
        pair.high.v[i] = static_cast<int8_t>(high - Bias);
    }
    return pair;
}
FOREWORD_INLINE X32 load_tokens(const int8_t* p) { return {p}; }
FOREWORD_INLINE I32x8 zero_sums() { return {}; }
FOREWORD_INLINE F32x8 to_float(const I32x8& a) {
    return each([&](int i) { return static_cast<float>(a.v[i]); });
}
template <int Quad, bool Unsigned>
FOREWORD_INLINE I32x8 dot(I32x8 acc, const W32& w, X32 x) {
    FOREWORD_LANES {
        for (int c = 0; c < 4; ++c) acc.v[i] += w.v[4 * i + c] * x.v[4 * Quad + c];
    }
    return acc;
}

}  // namespace
