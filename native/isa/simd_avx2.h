// Eight-lane vectors on x86 with AVX2, FMA and F16C; with AVX-512 VNNI the integer products are one instruction.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../half.h"

namespace {

#define FOREWORD_INLINE inline __attribute__((always_inline))

// Whether prefetching saves time.
constexpr bool kFetches = true;
constexpr int64_t kPrefetch = 6144;   // bytes to prefetch ahead, where every weight is read once

struct F32x8 {
    __m256 v;
};

FOREWORD_INLINE F32x8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
FOREWORD_INLINE void store(float* p, F32x8 a) { _mm256_storeu_ps(p, a.v); }
FOREWORD_INLINE F32x8 set1(float x) { return {_mm256_set1_ps(x)}; }
FOREWORD_INLINE F32x8 add(F32x8 a, F32x8 b) { return {_mm256_add_ps(a.v, b.v)}; }
FOREWORD_INLINE F32x8 sub(F32x8 a, F32x8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
FOREWORD_INLINE F32x8 mul(F32x8 a, F32x8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
FOREWORD_INLINE F32x8 mul(F32x8 a, float b) { return mul(a, set1(b)); }
FOREWORD_INLINE F32x8 div(F32x8 a, F32x8 b) { return {_mm256_div_ps(a.v, b.v)}; }
FOREWORD_INLINE F32x8 max(F32x8 a, F32x8 b) { return {_mm256_max_ps(a.v, b.v)}; }
FOREWORD_INLINE F32x8 min(F32x8 a, F32x8 b) { return {_mm256_min_ps(a.v, b.v)}; }
FOREWORD_INLINE F32x8 abs(F32x8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
// a * b + c with one rounding.
FOREWORD_INLINE F32x8 fma(F32x8 a, F32x8 b, F32x8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
FOREWORD_INLINE F32x8 fma(F32x8 a, float b, F32x8 c) { return fma(a, set1(b), c); }
FOREWORD_INLINE F32x8 round(F32x8 a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// The integer n nearest to x, and 2^n, for n in [-126, 127]. Adding 1.5 * 2^23 rounds to an integer, which the low bits of the sum
// then have.
struct Power {
    F32x8 exponent, value;   // n, 2^n
};
FOREWORD_INLINE Power nearest_power(F32x8 x) {
    const F32x8 offset = set1(12582912.0f), rounded = add(x, offset);
    const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(rounded.v), 23);
    const __m256i bits = _mm256_add_epi32(shifted, _mm256_castps_si256(_mm256_set1_ps(1.0f)));
    return {sub(rounded, offset), {_mm256_castsi256_ps(bits)}};
}
FOREWORD_INLINE float sum_lanes(F32x8 a) {
    const __m128 sums4 = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 sums2 = _mm_add_ps(sums4, _mm_movehl_ps(sums4, sums4));
    return _mm_cvtss_f32(_mm_add_ss(sums2, _mm_shuffle_ps(sums2, sums2, 1)));
}
FOREWORD_INLINE float max_lanes(F32x8 a) {
    const __m128 max4 = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 max2 = _mm_max_ps(max4, _mm_movehl_ps(max4, max4));
    return _mm_cvtss_f32(_mm_max_ss(max2, _mm_shuffle_ps(max2, max2, 1)));
}
FOREWORD_INLINE F32x8 load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
FOREWORD_INLINE F32x8 load(const BFloat* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
FOREWORD_INLINE F32x8 load_int8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}

// Stores eight integers in [-127, 127].
FOREWORD_INLINE void store_int8(int8_t* p, F32x8 a) {
    const F32x8 bounded = max(min(a, set1(127.0f)), set1(-127.0f));   // -128 would overflow in `dot_bytes`
    const __m256i wide = _mm256_cvtps_epi32(bounded.v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

FOREWORD_INLINE void transpose(F32x8 (&v)[8]) {
    __m256 pairs[8], quads[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(v[i].v, v[i + 1].v);
        pairs[i + 1] = _mm256_unpackhi_ps(v[i].v, v[i + 1].v);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
        quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        v[i].v = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
        v[i + 4].v = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
    }
}

// Weights of 8 rows x 4 columns, and their magnitudes.
struct W32 {
    __m256i v, magnitude;
};
struct WeightPair {
    W32 low, high;
};
struct X32 {
    const int8_t* v;
};
struct I32x8 {
    __m256i v;
};

FOREWORD_INLINE W32 with_magnitude(__m256i v) { return {v, _mm256_abs_epi8(v)}; }
FOREWORD_INLINE W32 load_weights(const uint8_t* p) {
    return with_magnitude(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FOREWORD_INLINE void store_weights(uint8_t* p, W32 w) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w.v); }
FOREWORD_INLINE __m256i load_vector(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
// Shifts the bits of every byte up by Shift (down if it is negative) and clears those outside Mask.
template <int Shift, int Mask>
FOREWORD_INLINE __m256i shifted_bits(__m256i v) {
    const __m256i shifted = Shift >= 0 ? _mm256_slli_epi16(v, Shift >= 0 ? Shift : 0) : _mm256_srli_epi16(v, Shift < 0 ? -Shift : 0);
    return _mm256_and_si256(shifted, _mm256_set1_epi8(Mask));
}
// Unpacks the columns 4J..4J+3 (low) and 16+4J..16+4J+3 (high) of 8 rows x 32 columns with 4, 5 or 6 bits.
template <int Bits, int Bias, int J>
FOREWORD_INLINE WeightPair unpack_levels(const uint8_t* p) {
    const __m256i both = load_vector(p + 32 * J);
    __m256i low = shifted_bits<0, 15>(both), high = shifted_bits<-4, 15>(both);
    if constexpr (Bits == 5) {
        const __m256i upper_bits = load_vector(p + 128);
        low = _mm256_or_si256(low, shifted_bits<4 - J, 16>(upper_bits));
        high = _mm256_or_si256(high, shifted_bits<-J, 16>(upper_bits));
    } else if constexpr (Bits == 6) {
        low = _mm256_or_si256(low, shifted_bits<4 - 2 * J, 48>(load_vector(p + 128)));
        high = _mm256_or_si256(high, shifted_bits<4 - 2 * J, 48>(load_vector(p + 160)));
    }
    if constexpr (Bias == 0) return {{low, low}, {high, high}};
    const __m256i bias = _mm256_set1_epi8(Bias);
    return {with_magnitude(_mm256_sub_epi8(low, bias)), with_magnitude(_mm256_sub_epi8(high, bias))};
}
FOREWORD_INLINE X32 load_tokens(const int8_t* p) { return {p}; }
FOREWORD_INLINE I32x8 zero_sums() { return {_mm256_setzero_si256()}; }
FOREWORD_INLINE F32x8 to_float(I32x8 a) { return {_mm256_cvtepi32_ps(a.v)}; }

// Adds the products of unsigned and signed bytes, four consecutive ones to each lane. Without VNNI, pairs are added in 16 bits.
// They cannot saturate: with |token| <= 127 and magnitude <= 128 a pair is at most 2 * 128 * 127 = 32512.
FOREWORD_INLINE __m256i dot_bytes(__m256i acc, __m256i magnitude, __m256i tokens) {
#ifdef __AVX512VNNI__
    return _mm256_dpbusd_epi32(acc, magnitude, tokens);
#else
    const __m256i pairs = _mm256_maddubs_epi16(magnitude, tokens);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

template <int Quad, bool Unsigned>
FOREWORD_INLINE I32x8 dot(I32x8 acc, W32 w, X32 x) {
    int32_t quad;
    std::memcpy(&quad, x.v + 4 * Quad, 4);
    const __m256i tokens = _mm256_set1_epi32(quad);
    if constexpr (Unsigned) return {dot_bytes(acc.v, w.v, tokens)};
    return {dot_bytes(acc.v, w.magnitude, _mm256_sign_epi8(tokens, w.v))};   // the weight's sign moves to the token
}

}  // namespace
