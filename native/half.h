// Conversion of 16-bit floats (IEEE half precision and bfloat16) in integer arithmetic, for packing and for instruction sets
// without conversions.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7FFFu;
    uint32_t bits;
    if (magnitude >= 0x7C00u) {
        bits = sign | 0x7F800000u | (magnitude & 0x3FFu) << 13;   // infinity or NaN
    } else {
        const uint32_t shifted = magnitude << 13;
        float value;
        std::memcpy(&value, &shifted, 4);
        value *= 5.19229686e33f;   // 2^112 corrects the exponent's bias, and makes subnormal halves normal
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Rounds to nearest, ties to even; numbers that are too large become infinity.
inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return sign | 0x7E00u;
    if (magnitude >= 0x477FF000u) return sign | 0x7C00u;
    if (magnitude < 0x38800000u) {   // subnormal half: adding 0.5 makes the float adder round
        float small;
        std::memcpy(&small, &magnitude, 4);
        small += 0.5f;
        std::memcpy(&bits, &small, 4);
        return sign | static_cast<uint16_t>(bits - 0x3F000000u);
    }
    const uint32_t odd = magnitude >> 13 & 1u;
    return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xFFFu + odd) >> 13);
}

// A bfloat16, the upper half of a float. As a separate type it selects the overloads that read and store it.
struct BFloat {
    uint16_t bits;
};

inline float to_float(BFloat number) {
    const uint32_t bits = static_cast<uint32_t>(number.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Converts a float to the type in which it is stored, rounding to nearest, ties to even; NaN stays NaN.
template <typename T>
T rounded(float value);
template <>
inline float rounded(float value) { return value; }
template <>
inline BFloat rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}

}  // namespace
