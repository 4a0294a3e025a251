// Eight-lane vectors on ARM NEON. Every reduction has the same order as in the other instruction sets.
// Each instruction set has one translation unit, and its kernels are in an anonymous namespace, so that they do not collide.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "../half.h"

namespace {

#define FOREWORD_INLINE inline __attribute__((always_inline))

// Whether prefetching saves time.
constexpr bool kFetches = true;
constexpr int64_t kPrefetch = 1536;   // bytes to prefetch ahead, where every weight is read once

struct F32x8 {
    float32x4_t lo, hi;
};

FOREWORD_INLINE F32x8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
FOREWORD_INLINE void store(float* p, F32x8 a) {
    vst1q_f32(p, a.lo);
    vst1q_f32(p + 4, a.hi);
}
FOREWORD_INLINE F32x8 set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
FOREWORD_INLINE F32x8 add(F32x8 a, F32x8 b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
FOREWORD_INLINE F32x8 sub(F32x8 a, F32x8 b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
FOREWORD_INLINE F32x8 mul(F32x8 a, F32x8 b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
FOREWORD_INLINE F32x8 div(F32x8 a, F32x8 b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
FOREWORD_INLINE F32x8 max(F32x8 a, F32x8 b) { return {vmaxq_f32(a.lo, b.lo), vmaxq_f32(a.hi, b.hi)}; }
FOREWORD_INLINE F32x8 min(F32x8 a, F32x8 b) { return {vminq_f32(a.lo, b.lo), vminq_f32(a.hi, b.hi)}; }
FOREWORD_INLINE F32x8 abs(F32x8 a) { return {vabsq_f32(a.lo), vabsq_f32(a.hi)}; }
// a * b + c with one rounding.
FOREWORD_INLINE F32x8 fma(F32x8 a, F32x8 b, F32x8 c) {
    return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)};
}
FOREWORD_INLINE F32x8 fma(F32x8 a, float b, F32x8 c) {
    return {vfmaq_n_f32(c.lo, a.lo, b), vfmaq_n_f32(c.hi, a.hi, b)};
}
FOREWORD_INLINE F32x8 mul(F32x8 a, float b) { return {vmulq_n_f32(a.lo, b), vmulq_n_f32(a.hi, b)}; }
// Adding 1.5 * 2^23 rounds |x| < 2^22 to an integer, which the low bits of the sum then have. Two additions run per cycle, but only
// one rounding or conversion in two cycles.
constexpr float kRoundingOffset = 12582912.0f;
FOREWORD_INLINE F32x8 round(F32x8 a) { return sub(add(a, set1(kRoundingOffset)), set1(kRoundingOffset)); }
// The integer n nearest to x, and 2^n, for n in [-126, 127].
struct Power {
    F32x8 exponent, value;   // n, 2^n
};
FOREWORD_INLINE Power nearest_power(F32x8 x) {
    const F32x8 shifted = add(x, set1(kRoundingOffset));
    const uint32x4_t one = vreinterpretq_u32_f32(vdupq_n_f32(1.0f));
    const uint32x4_t lo = vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(shifted.lo), 23), one);
    const uint32x4_t hi = vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(shifted.hi), 23), one);
    return {sub(shifted, set1(kRoundingOffset)), {vreinterpretq_f32_u32(lo), vreinterpretq_f32_u32(hi)}};
}
FOREWORD_INLINE float sum_lanes(F32x8 a) {
    const float32x4_t four = vaddq_f32(a.lo, a.hi);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
FOREWORD_INLINE float max_lanes(F32x8 a) { return vmaxvq_f32(vmaxq_f32(a.lo, a.hi)); }

FOREWORD_INLINE F32x8 load_half(const uint16_t* p) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))};
}
FOREWORD_INLINE F32x8 load(const BFloat* p) {
    const uint16x8_t bits = vld1q_u16(&p->bits);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16))};
}
FOREWORD_INLINE F32x8 load_int8(const uint8_t* p) {
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
}

// Stores eight integers in [-127, 127].
FOREWORD_INLINE void store_int8(int8_t* p, F32x8 a) {
    const F32x8 shifted = add(a, set1(kRoundingOffset));
    const int16x8_t lo = vreinterpretq_s16_f32(shifted.lo), hi = vreinterpretq_s16_f32(shifted.hi);
    vst1_s8(p, vmovn_s16(vuzp1q_s16(lo, hi)));
}

FOREWORD_INLINE void transpose_four(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
    const float32x4x2_t ab = vtrnq_f32(a, b), cd = vtrnq_f32(c, d);
    a = vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0]));
    b = vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1]));
    c = vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0]));
    d = vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1]));
}
FOREWORD_INLINE void transpose(F32x8 (&v)[8]) {
    transpose_four(v[0].lo, v[1].lo, v[2].lo, v[3].lo);
    transpose_four(v[4].hi, v[5].hi, v[6].hi, v[7].hi);
    transpose_four(v[0].hi, v[1].hi, v[2].hi, v[3].hi);
    transpose_four(v[4].lo, v[5].lo, v[6].lo, v[7].lo);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const float32x4_t corner = v[i].hi;
        v[i].hi = v[i + 4].lo;
        v[i + 4].lo = corner;
    }
}

// Integer part of a quantised product: 8 output rows x 4 columns in one W32, 32 columns of a token in one X32.
struct W32 {
    int8x16_t lo, hi;
};
struct X32 {
    int8x16_t lo, hi;
};
struct I32x8 {
    int32x4_t lo, hi;
};

FOREWORD_INLINE W32 load_weights(const uint8_t* p) {
    const int8_t* s = reinterpret_cast<const int8_t*>(p);
    return {vld1q_s8(s), vld1q_s8(s + 16)};
}
FOREWORD_INLINE void store_weights(uint8_t* p, W32 w) {
    int8_t* s = reinterpret_cast<int8_t*>(p);
    vst1q_s8(s, w.lo);
    vst1q_s8(s + 16, w.hi);
}
struct WeightPair {
    W32 low, high;
};
// Shifts the bits of every byte up by Shift (down if it is negative) and clears those outside Mask.
template <int Shift, int Mask>
FOREWORD_INLINE uint8x16_t shifted_bits(uint8x16_t v) {
    if constexpr (Shift > 0) v = vshlq_n_u8(v, Shift);
    if constexpr (Shift < 0) v = vshrq_n_u8(v, -Shift);
    return vandq_u8(v, vdupq_n_u8(Mask));
}
// Unpacks the columns 4J..4J+3 (Low) or 16+4J..16+4J+3 of 4 rows x 32 columns with 4, 5 or 6 bits.
template <int Bits, int Bias, int J, bool Low>
FOREWORD_INLINE int8x16_t unpack_half(const uint8_t* p) {
    const uint8x16_t both = vld1q_u8(p + 32 * J);
    uint8x16_t level = Low ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4);
    if constexpr (Bits == 5) level = vorrq_u8(level, shifted_bits<Low ? 4 - J : -J, 16>(vld1q_u8(p + 128)));
    if constexpr (Bits == 6) level = vorrq_u8(level, shifted_bits<4 - 2 * J, 48>(vld1q_u8(p + (Low ? 128 : 160))));
    const int8x16_t unbiased = vreinterpretq_s8_u8(level);
    return Bias == 0 ? unbiased : vsubq_s8(unbiased, vdupq_n_s8(Bias));
}
// Unpacks the columns 4J..4J+3 (low) and 16+4J..16+4J+3 (high) of 8 rows.
template <int Bits, int Bias, int J>
FOREWORD_INLINE WeightPair unpack_levels(const uint8_t* p) {
    return {{unpack_half<Bits, Bias, J, true>(p), unpack_half<Bits, Bias, J, true>(p + 16)},
            {unpack_half<Bits, Bias, J, false>(p), unpack_half<Bits, Bias, J, false>(p + 16)}};
}
FOREWORD_INLINE X32 load_tokens(const int8_t* p) { return {vld1q_s8(p), vld1q_s8(p + 16)}; }

// Sums start at the bits of 1.5 * 2^23. A group's sum is below 2^22, so the bits of the result are a float, and `to_float` subtracts
// the offset (two per cycle) instead of converting (one in two cycles).
FOREWORD_INLINE I32x8 zero_sums() { return {vdupq_n_s32(0x4B400000), vdupq_n_s32(0x4B400000)}; }
FOREWORD_INLINE F32x8 to_float(I32x8 a) {
    const float32x4_t offset = vdupq_n_f32(kRoundingOffset);
    return {vsubq_f32(vreinterpretq_f32_s32(a.lo), offset), vsubq_f32(vreinterpretq_f32_s32(a.hi), offset)};
}

#ifdef __ARM_FEATURE_DOTPROD
template <int Quad, bool Unsigned>
FOREWORD_INLINE I32x8 dot(I32x8 acc, W32 w, X32 x) {
    if constexpr (Quad < 4) {
        return {vdotq_laneq_s32(acc.lo, w.lo, x.lo, Quad), vdotq_laneq_s32(acc.hi, w.hi, x.lo, Quad)};
    } else {
        return {vdotq_laneq_s32(acc.lo, w.lo, x.hi, Quad - 4), vdotq_laneq_s32(acc.hi, w.hi, x.hi, Quad - 4)};
    }
}
#else
FOREWORD_INLINE int32x4_t dot_rows(int32x4_t acc, int8x16_t w, int8x16_t x) {
    const int32x4_t first = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
    const int32x4_t second = vpaddlq_s16(vmull_s8(vget_high_s8(w), vget_high_s8(x)));
    return vaddq_s32(acc, vpaddq_s32(first, second));
}
template <int Quad, bool Unsigned>
FOREWORD_INLINE I32x8 dot(I32x8 acc, W32 w, X32 x) {
    const int32x4_t half = vreinterpretq_s32_s8(Quad < 4 ? x.lo : x.hi);
    const int8x16_t quad = vreinterpretq_s8_s32(vdupq_laneq_s32(half, Quad % 4));
    return {dot_rows(acc.lo, w.lo, quad), dot_rows(acc.hi, w.hi, quad)};
}
#endif

}  // namespace
