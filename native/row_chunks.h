// Chunks of a row of logits, and vector arithmetic on them, for row_floor.cpp and row_draw.cpp.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace foreword {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A row is read in chunks of whole vectors, and its last chunk is padded with -inf. So every logit passes through the same
// instructions, and the result of a row does not depend on its address or its length.
// Vectors have 16 bytes: every target has such registers, so the compiler does not split the vectors.
typedef float FloatVector __attribute__((vector_size(16)));
typedef int32_t IntVector __attribute__((vector_size(16)));    // the result of a comparison: -1 or 0 per lane
typedef uint32_t BitVector __attribute__((vector_size(16)));   // additions and shifts wrap
constexpr int64_t kLanes = 4;
constexpr int64_t kVectors = 8;
constexpr int64_t kChunk = kLanes * kVectors;   // logits

template <typename To, typename From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

typedef float UnalignedFloats __attribute__((vector_size(16), aligned(4), may_alias));

struct Chunk {
    FloatVector vectors[kVectors];
};

// Returns the chunk that begins at logit `start`: the row's memory, or if the row ends in the chunk, a padded copy in `padded`.
inline const UnalignedFloats* view_chunk(const float* row, int64_t start, int64_t vocab, Chunk& padded) {
    if (start + kChunk <= vocab) return reinterpret_cast<const UnalignedFloats*>(row + start);
    for (FloatVector& vector : padded.vectors) vector = FloatVector{} - kInfinity;
    std::memcpy(&padded, row + start, static_cast<size_t>(vocab - start) * sizeof(float));
    return reinterpret_cast<const UnalignedFloats*>(&padded);
}

constexpr int64_t kInterleaved = 4;   // vectors per call of exp_nonpositive: a single one would wait for each of its results

// Replaces kInterleaved vectors x <= 0 by exp(x), to about one unit in the last place of float32.
inline void exp_nonpositive(FloatVector* x) {
    constexpr float kRound = 12582912.0f + 127.0f;  // adding it rounds to an integer in the low bits, plus the exponent's bias
    const FloatVector lowest = FloatVector{} - 87.0f;
    FloatVector n[kInterleaved], r[kInterleaved], p[kInterleaved], scale[kInterleaved];
#define EACH for (int64_t k = 0; k < kInterleaved; ++k)
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
    EACH x[k] = p[k] * bits_as<FloatVector>(bits_as<BitVector>(scale[k]) << 23);
#undef EACH
}

}  // namespace foreword
