// Numbers of 16 bits by their bits, for packing and for instruction sets that cannot convert: IEEE half precision, and
// bfloat16, the upper half of a float.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t rest = half & 0x7FFFu;
    uint32_t bits;
    if (rest >= 0x7C00u) {
        bits = sign | 0x7F800000u | (rest & 0x3FFu) << 13;   // infinity, not a number
    } else {
        const uint32_t shifted = rest << 13;
        float value;
        std::memcpy(&value, &shifted, 4);
        value *= 5.19229686e33f;   // 2^112 moves the exponent, and makes subnormal halves normal
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Rounds to nearest, ties to even; too large becomes infinity.
inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return sign | 0x7E00u;
    if (magnitude >= 0x477FF000u) return sign | 0x7C00u;
    if (magnitude < 0x38800000u) {   // subnormal half: let the float adder do the rounding
        float small;
        std::memcpy(&small, &magnitude, 4);
        small += 0.5f;
        std::memcpy(&bits, &small, 4);
        return sign | static_cast<uint16_t>(bits - 0x3F000000u);
    }
    const uint32_t odd = magnitude >> 13 & 1u;
    return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xFFFu + odd) >> 13);
}

// A type of its own, so that a pointer says how to read what it points at.
struct BFloat {
    uint16_t bits;
};

inline float to_float(BFloat number) {
    const uint32_t bits = static_cast<uint32_t>(number.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// A float as it is stored, rounded to nearest, ties to even; what is no number stays none.
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
