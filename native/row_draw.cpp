// The token that a row draws: Gumbel noise from an integer hash, and the largest of logit and noise.
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

// What a token adds to a row's key.
constexpr uint64_t noise_step(int64_t token) { return (static_cast<uint64_t>(token) + 1) * kGamma; }

double gumbel(uint64_t bits) {
    constexpr double kUnit = 0x1p-54;
    const uint64_t units = (bits >> 10) | 1;
    if (units < (1ull << 53)) return -std::log(-std::log(static_cast<double>(units) * kUnit));
    return -std::log(-std::log1p(-static_cast<double>((1ull << 54) - units) * kUnit));
}

// Gumbel noise is at most -log(1 - u), and 1 - u has as many leading zero bits as u has leading ones.
inline float gumbel_bound(uint64_t bits) {
    return 0.6931472f * static_cast<float>((~bits ? __builtin_clzll(~bits) : 64) + 1);
}

// Leading bits, all of them ones, without which a `gumbel_bound` stays below `noise`; 0: there are none.
inline uint64_t bits_for(float noise) {
    const float ones = noise * 1.442695f - 1.001f;  // and not one more for being rounded
    return ones >= 1 ? ~0ull << (64 - static_cast<int>(std::min(ones, 64.0f))) : 0;
}

constexpr uint64_t kFirstFactor = 0xBF58476D1CE4E5B9ull, kSecondFactor = 0x94D049BB133111EBull;

inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * kFirstFactor;
    z = (z ^ (z >> 27)) * kSecondFactor;
    return z ^ (z >> 31);
}

constexpr uint64_t kLeading = ~0ull << 33;  // what the last line above leaves as it is

#if defined(__aarch64__)
// Two products of 64 bits. There is no such instruction: of both halves' products, what stays below 2^64.
struct Factor {
    uint32x2_t low;
    uint32x4_t swapped;

    explicit Factor(uint64_t factor)
        : low(vdup_n_u32(static_cast<uint32_t>(factor))),
          swapped(vreinterpretq_u32_u64(vdupq_n_u64(factor << 32 | factor >> 32))) {}

    uint64x2_t times(uint64x2_t z) const {
        const uint64x2_t crossed = vpaddlq_u32(vmulq_u32(vreinterpretq_u32_u64(z), swapped));
        return vmlal_u32(vshlq_n_u64(crossed, 32), vmovn_u64(z), low);
    }
};
#endif

// The noise of a row's places: bits that depend on the row's key and on the token. Tokens are `kListed`, or a place is
// the token's number.
template <bool kListed>
class Noise {
public:
    Noise(uint64_t key, const uint64_t* steps) : key_(key), steps_(steps) {}

    uint64_t bits(int64_t place) const { return mix(unmixed(place)); }

    // Whether one of the places of the whole chunk from `start` on may have these leading bits. All but a few tokens
    // of a row are ruled out by them, and nothing else is worked out for those.
    __attribute__((always_inline)) bool may_have(uint64_t leading, int64_t start) const {
        leading &= kLeading;
        uint64_t largest = 0;
#if defined(__aarch64__)
        // Half of them as vectors, half as numbers: they have multipliers of their own, and too few of either kind.
        constexpr int64_t kNumbers = kChunk / 2;
        const Factor first(kFirstFactor), second(kSecondFactor);
        const uint64x2_t least = vdupq_n_u64(leading), two = vdupq_n_u64(2 * kGamma), key = vdupq_n_u64(key_);
        uint64x2_t pair = vcombine_u64(vcreate_u64(unmixed(start)), vcreate_u64(unmixed(start + 1))), any = vdupq_n_u64(0);
        uint64_t at = unmixed(start + kNumbers);
#pragma GCC unroll 8
        for (int64_t i = 0; i < kNumbers; i += 2) {
            uint64x2_t z = kListed ? vaddq_u64(key, vld1q_u64(steps_ + start + i)) : pair;
            z = first.times(veorq_u64(z, vshrq_n_u64(z, 30)));
            z = second.times(veorq_u64(z, vshrq_n_u64(z, 27)));
            any = vorrq_u64(any, vcgeq_u64(z, least));
            pair = vaddq_u64(pair, two);
            for (int64_t place = start + kNumbers + i; place < start + kNumbers + i + 2; ++place) {
                const uint64_t bits = mix(kListed ? unmixed(place) : at);
                largest = bits > largest ? bits : largest;
                at += kGamma;
            }
        }
        if ((vgetq_lane_u64(any, 0) | vgetq_lane_u64(any, 1)) != 0) return true;
#else
        for (int64_t place = start; place < start + kChunk; ++place) largest = std::max(largest, bits(place));
#endif
        return largest >= leading;
    }

private:
    uint64_t unmixed(int64_t place) const { return key_ + (kListed ? steps_[place] : noise_step(place)); }

    uint64_t key_;
    const uint64_t* steps_;
};

// The best place of a row so far.
template <bool kListed>
class Drawing {
public:
    Drawing(const float* logits, int64_t vocab, const RowDraw& draw, const uint64_t* steps)
        : logits_(logits), vocab_(vocab), draw_(draw), rate_(static_cast<float>(1.0 / draw.temperature)), noise_(draw.key, steps) {}

    // The place that is drawn, by the largest logit of every chunk.
    int64_t of(const std::vector<float>& chunk_max) {
        // The likeliest first: what is far from it is ruled out all the sooner.
        const auto likeliest = std::max_element(chunk_max.begin(), chunk_max.end()) - chunk_max.begin();
        look_at(likeliest * kChunk, 0);
        const auto chunks = static_cast<int64_t>(chunk_max.size()), whole = vocab_ / kChunk;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            if (chunk_max[chunk] < draw_.floor || chunk == likeliest) continue;
            const uint64_t leading = bits_for(hopeless_ - (chunk_max[chunk] - draw_.peak) * rate_);
            if (chunk >= whole || noise_.may_have(leading, chunk * kChunk)) look_at(chunk * kChunk, leading);
        }
        return place_;
    }

private:
    // The places of a chunk whose noise has these leading bits.
    __attribute__((noinline)) void look_at(int64_t start, uint64_t leading) {
        for (int64_t place = start; place < std::min(start + kChunk, vocab_); ++place) {
            const uint64_t bits = noise_.bits(place);
            if (bits >= leading && logits_[place] >= draw_.floor) judge(place, bits);
        }
    }

    void judge(int64_t place, uint64_t bits) {
        constexpr float kSafety = 1e-2f;  // far more than the bound below can be rounded
        if ((logits_[place] - draw_.peak) * rate_ + gumbel_bound(bits) < hopeless_) return;
        const double distance = static_cast<double>(logits_[place]) - static_cast<double>(draw_.peak);
        const double score = distance / draw_.temperature + gumbel(bits);
        if (score < best_ || (score == best_ && place > place_)) return;  // the first of equals
        best_ = score;
        place_ = place;
        hopeless_ = static_cast<float>(score) - kSafety - 1e-6f * std::fabs(static_cast<float>(score));
    }

    const float* logits_;
    int64_t vocab_;
    const RowDraw& draw_;
    float rate_;
    Noise<kListed> noise_;
    double best_ = -std::numeric_limits<double>::infinity();
    float hopeless_ = -kInfinity;  // with less than this a place cannot be the best
    int64_t place_ = -1;
};

}  // namespace

uint64_t row_key(uint64_t stem, int64_t position) {
    return mix((stem + kGamma) ^ static_cast<uint64_t>(position));
}

std::vector<uint64_t> noise_steps(const int32_t* ids, int64_t count) {
    std::vector<uint64_t> steps;
    for (int64_t place = 0; place < count; ++place) steps.push_back(noise_step(ids[place]));
    return steps;
}

int64_t row_draw(const float* logits, int64_t vocab, const RowDraw& draw, const std::vector<float>& chunk_max, const uint64_t* steps) {
    if (draw.only >= 0) return draw.only;
    if (steps != nullptr) return Drawing<true>(logits, vocab, draw, steps).of(chunk_max);
    return Drawing<false>(logits, vocab, draw, steps).of(chunk_max);
}

RowToken row_sample(
    const float* logits, int64_t vocab, const RowShape& shape, uint64_t key, SamplerScratch& scratch, const uint64_t* steps
) {
    const RowFloor found = row_floor(logits, vocab, shape, scratch);
    if (found.peak == -kInfinity) return {-1, RowStatus::kAllMasked};
    if (!std::isfinite(found.peak)) return {-1, RowStatus::kNotFinite};
    const RowDraw draw{found.peak, found.floor, shape.temperature, found.first, key};
    return {row_draw(logits, vocab, draw, scratch.chunk_max, steps), RowStatus::kOk};
}

}  // namespace foreword
