// A row of logits in chunks of vectors: what finding floors and drawing tokens share.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace foreword {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows are taken in blocks of vectors; the last block of a row is filled up with -inf. So an element meets the
// same instructions wherever it stands, and the result of a row cannot depend on where the row lies.
// Vectors of 16 bytes: what every target has, and what the compiler does not take apart.
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));       // what a comparison gives
typedef uint32_t Words __attribute__((vector_size(16)));     // bits to add and shift, which may carry out
constexpr int64_t kLanes = 4;
constexpr int64_t kVectors = 8;
constexpr int64_t kChunk = kLanes * kVectors;

template <typename To, typename From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

typedef float LooseFloats __attribute__((vector_size(16), aligned(4), may_alias));

struct Chunk {
    Floats part[kVectors];
};

// A chunk of a row, in place where the row fills it, else a copy in `spare`.
inline const LooseFloats* view_chunk(const float* row, int64_t start, int64_t vocab, Chunk& spare) {
    if (start + kChunk <= vocab) return reinterpret_cast<const LooseFloats*>(row + start);
    for (Floats& part : spare.part) part = Floats{} - kInfinity;
    std::memcpy(&spare, row + start, static_cast<size_t>(vocab - start) * sizeof(float));
    return reinterpret_cast<const LooseFloats*>(&spare);
}

// exp(x) for x <= 0, to about one unit in the last place of float32. Four vectors go through it side by side,
// as one alone would wait for each of its own results.
constexpr int64_t kAbreast = 4;

inline void exp_nonpositive(Floats* x) {
    constexpr float kRound = 12582912.0f + 127.0f;  // rounds to an integer, with the exponent's bias in the low bits
    const Floats lowest = Floats{} - 87.0f;
    Floats n[kAbreast], r[kAbreast], p[kAbreast], scale[kAbreast];
#define EACH for (int64_t k = 0; k < kAbreast; ++k)
    EACH x[k] = x[k] > lowest ? x[k] : lowest;
    EACH scale[k] = x[k] * 1.44269504f + kRound;
    EACH n[k] = scale[k] - kRound;
    EACH r[k] = x[k] - n[k] * 0.693359375f;
    EACH r[k] = r[k] + n[k] * 2.12194440e-4f;
    EACH p[k] = r[k] * 1.9875691500e-4f + 1.3981999507e-3f;
    EACH p[k] = p[k] * r[k] + 8.3334519073e-3f;
    EACH p[k] = p[k] * r[k] + 4.1665795894e-2f;
    EACH p[k] = p[k] * r[k] + 1.6666665459e-1f;
    EACH p[k] = p[k] * r[k] + 5.0000001201e-1f;
    EACH p[k] = p[k] * (r[k] * r[k]) + (r[k] + 1.0f);
    EACH x[k] = p[k] * bits_as<Floats>(bits_as<Words>(scale[k]) << 23);
#undef EACH
}

}  // namespace foreword
