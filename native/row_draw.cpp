// Draws a token of a row: the largest sum of scaled logit and Gumbel noise, which comes from an integer hash (SplitMix64).
#include <algorithm>
#include <cmath>
#include <limits>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "row_chunks.h"
#include "sampler.h"

namespace foreword {
namespace {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15ull;

// Returns the number that a token adds to a row's key.
constexpr uint64_t noise_step(int64_t token) { return (static_cast<uint64_t>(token) + 1) * kGamma; }

// Returns -log(-log(u)) for the uniform number u of the upper 54 bits.
double gumbel(uint64_t bits) {
    constexpr double kUnit = 0x1p-54;
    const uint64_t units = (bits >> 10) | 1;
    if (units < (1ull << 53)) return -std::log(-std::log(static_cast<double>(units) * kUnit));
    return -std::log(-std::log1p(-static_cast<double>((1ull << 54) - units) * kUnit));
}

// Returns an upper bound of the noise of these bits. Gumbel noise is at most -log(1 - u), and 1 - u has as many leading zero bits as
// u has leading ones.
inline float gumbel_bound(uint64_t bits) {
    return 0.6931472f * static_cast<float>((~bits ? __builtin_clzll(~bits) : 64) + 1);
}

// Returns the least noise bits that may reach `noise`, as a number of leading ones: the `gumbel_bound` of smaller bits is below
// `noise`. Returns 0 if all bits may reach it.
inline uint64_t leading_ones_for(float noise) {
    const float ones = noise * 1.442695f - 1.001f;  // rounding must not add a bit
    return ones >= 1 ? ~0ull << (64 - static_cast<int>(std::min(ones, 64.0f))) : 0;
}

constexpr uint64_t kFirstFactor = 0xBF58476D1CE4E5B9ull, kSecondFactor = 0x94D049BB133111EBull;

inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * kFirstFactor;
    z = (z ^ (z >> 27)) * kSecondFactor;
    return z ^ (z >> 31);
}

constexpr uint64_t kUnchangedBits = ~0ull << 33;  // the last line of `mix` does not change these bits of z

#if defined(__aarch64__)
// Multiplies two 64-bit lanes modulo 2^64, from products of 32-bit halves, because there is no such instruction.
struct LaneFactor {
    uint32x2_t low;
    uint32x4_t swapped;

    explicit LaneFactor(uint64_t factor)
        : low(vdup_n_u32(static_cast<uint32_t>(factor))),
          swapped(vreinterpretq_u32_u64(vdupq_n_u64(factor << 32 | factor >> 32))) {}

    uint64x2_t times(uint64x2_t z) const {
        const uint64x2_t crossed = vpaddlq_u32(vmulq_u32(vreinterpretq_u32_u64(z), swapped));
        return vmlal_u32(vshlq_n_u64(crossed, 32), vmovn_u64(z), low);
    }
};
#endif

// The noise bits of a row, which depend on its key and on the token. With `kHasSteps` each index has a noise step; else
// indices are token ids.
template <bool kHasSteps>
class Noise {
public:
    Noise(uint64_t key, const uint64_t* noise_steps) : key_(key), noise_steps_(noise_steps) {}

    uint64_t bits(int64_t index) const { return mix(unmixed(index)); }

    // Returns whether an index of the chunk that begins at `start` may have bits >= `leading`. The row must not end in the chunk.
    // Most tokens of a row are excluded in this way, without computing anything else for them.
    __attribute__((always_inline)) bool may_reach(uint64_t leading, int64_t start) const {
        leading &= kUnchangedBits;
        uint64_t largest = 0;
#if defined(__aarch64__)
        // One half of the chunk in vectors, the other in scalars, which have their own multipliers.
        constexpr int64_t kScalars = kChunk / 2;
        const LaneFactor first(kFirstFactor), second(kSecondFactor);
        const uint64x2_t least = vdupq_n_u64(leading), two = vdupq_n_u64(2 * kGamma), key = vdupq_n_u64(key_);
        uint64x2_t pair = vcombine_u64(vcreate_u64(unmixed(start)), vcreate_u64(unmixed(start + 1))), any = vdupq_n_u64(0);
        uint64_t scalar = unmixed(start + kScalars);
#pragma GCC unroll 8
        for (int64_t i = 0; i < kScalars; i += 2) {
            uint64x2_t z = kHasSteps ? vaddq_u64(key, vld1q_u64(noise_steps_ + start + i)) : pair;
            z = first.times(veorq_u64(z, vshrq_n_u64(z, 30)));
            z = second.times(veorq_u64(z, vshrq_n_u64(z, 27)));
            any = vorrq_u64(any, vcgeq_u64(z, least));
            pair = vaddq_u64(pair, two);
            for (int64_t index = start + kScalars + i; index < start + kScalars + i + 2; ++index) {
                const uint64_t bits = mix(kHasSteps ? unmixed(index) : scalar);
                largest = bits > largest ? bits : largest;
                scalar += kGamma;
            }
        }
        if ((vgetq_lane_u64(any, 0) | vgetq_lane_u64(any, 1)) != 0) return true;
#else
        for (int64_t index = start; index < start + kChunk; ++index) largest = std::max(largest, bits(index));
#endif
        return largest >= leading;
    }

private:
    uint64_t unmixed(int64_t index) const { return key_ + (kHasSteps ? noise_steps_[index] : noise_step(index)); }

    uint64_t key_;
    const uint64_t* noise_steps_;
};

// Finds the best index of a row.
template <bool kHasSteps>
class Drawing {
public:
    Drawing(const float* logits, int64_t vocab, const RowDraw& draw, const uint64_t* noise_steps)
        : logits_(logits), vocab_(vocab), draw_(draw), rate_(static_cast<float>(1.0 / draw.temperature)), noise_(draw.key, noise_steps) {}

    // Returns the best index, or -1; `chunk_max` has the largest logit of every chunk.
    int64_t draw(const std::vector<float>& chunk_max) {
        // The most likely chunk comes first, because a good score excludes more of the others.
        const auto likeliest = std::max_element(chunk_max.begin(), chunk_max.end()) - chunk_max.begin();
        scan_chunk(likeliest * kChunk, 0);
        const auto chunks = static_cast<int64_t>(chunk_max.size()), whole_chunks = vocab_ / kChunk;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            if (chunk_max[chunk] < draw_.floor || chunk == likeliest) continue;
            const uint64_t leading = leading_ones_for(least_score_ - (chunk_max[chunk] - draw_.peak) * rate_);
            if (chunk >= whole_chunks || noise_.may_reach(leading, chunk * kChunk)) scan_chunk(chunk * kChunk, leading);
        }
        return index_;
    }

private:
    // Evaluates the indices of a chunk whose noise bits are at least `leading`.
    __attribute__((noinline)) void scan_chunk(int64_t start, uint64_t leading) {
        for (int64_t index = start; index < std::min(start + kChunk, vocab_); ++index) {
            const uint64_t bits = noise_.bits(index);
            if (bits >= leading && logits_[index] >= draw_.floor) evaluate(index, bits);
        }
    }

    void evaluate(int64_t index, uint64_t bits) {
        constexpr float kSafety = 1e-2f;  // far more than the rounding error of the bound
        if ((logits_[index] - draw_.peak) * rate_ + gumbel_bound(bits) < least_score_) return;
        const double distance = static_cast<double>(logits_[index]) - static_cast<double>(draw_.peak);
        const double score = distance / draw_.temperature + gumbel(bits);
        if (score < best_ || (score == best_ && index > index_)) return;  // of equal scores the first wins
        best_ = score;
        index_ = index;
        least_score_ = static_cast<float>(score) - kSafety - 1e-6f * std::fabs(static_cast<float>(score));
    }

    const float* logits_;
    int64_t vocab_;
    const RowDraw& draw_;
    float rate_;
    Noise<kHasSteps> noise_;
    double best_ = -std::numeric_limits<double>::infinity();
    float least_score_ = -kInfinity;  // an index with a lower bound cannot be the best
    int64_t index_ = -1;
};

}  // namespace

uint64_t row_key(uint64_t stem, int64_t position) {
    return mix((stem + kGamma) ^ static_cast<uint64_t>(position));
}

std::vector<uint64_t> noise_steps_of(const int32_t* ids, int64_t count) {
    std::vector<uint64_t> steps;
    for (int64_t index = 0; index < count; ++index) steps.push_back(noise_step(ids[index]));
    return steps;
}

int64_t row_draw(const float* logits, int64_t vocab, const RowDraw& draw, const std::vector<float>& chunk_max, const uint64_t* noise_steps) {
    if (draw.greedy_token >= 0) return draw.greedy_token;
    if (noise_steps != nullptr) return Drawing<true>(logits, vocab, draw, noise_steps).draw(chunk_max);
    return Drawing<false>(logits, vocab, draw, noise_steps).draw(chunk_max);
}

RowToken row_sample(
    const float* logits, int64_t vocab, const RowParams& params, uint64_t key, SamplerScratch& scratch, const uint64_t* noise_steps
) {
    const RowFloor row = row_floor(logits, vocab, params, scratch);
    if (row.peak == -kInfinity) return {-1, RowStatus::kAllMasked};
    if (!std::isfinite(row.peak)) return {-1, RowStatus::kNotFinite};
    const RowDraw draw{row.peak, row.floor, params.temperature, row.greedy_token, key};
    return {row_draw(logits, vocab, draw, scratch.chunk_max, noise_steps), RowStatus::kOk};
}

}  // namespace foreword
