#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace foreword {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kOne = 0x1p40;  // the weight of the most likely token
constexpr float kHalfway = 0x1p20f;
constexpr float kTiny = -28.5f;  // below this a weight rounds to 0
constexpr double kSlack = 1.0 - 1e-6;
constexpr int64_t kHeapLimit = 512;

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

inline float largest_lane(Floats v) {
    float most = v[0];
    for (int64_t lane = 1; lane < kLanes; ++lane) most = v[lane] > most ? v[lane] : most;
    return most;
}

inline bool any_lane(Ints v) {
    int32_t any = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) any |= v[lane];
    return any != 0;
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

// Weights as integers: exp * 2^40, rounded, in two parts that fit a lane each. Adding a float whose last bit is worth
// one leaves an integer in the low bits of the sum; what it adds to the bits is taken off at the end.
struct WeightSum {
    static constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
    Words high{};
    Words low{};

    void add(Floats exponentials) {
        const Floats scaled = exponentials * kHalfway;
        const Floats whole = scaled + kShift;
        const Floats rest = (scaled - (whole - kShift)) * kHalfway + kShift;
        high += bits_as<Words>(whole);
        low += bits_as<Words>(rest);
    }

    int64_t total(int64_t added) const {
        const uint32_t offset = static_cast<uint32_t>(added) * bits_as<uint32_t>(kShift);
        int64_t sum = 0;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const auto large = static_cast<int32_t>(high[lane] - offset);
            const auto small = static_cast<int32_t>(low[lane] - offset);
            sum += (int64_t{large} << 20) + small;
        }
        return sum;
    }
};

inline int64_t weight_of(float exponential) {
    return std::llrint(static_cast<double>(exponential) * kOne);
}

// The largest logit of a chunk; whether one is NaN goes to `unordered`.
inline float largest_of(const LooseFloats* part, Ints& unordered) {
    Floats most[2] = {part[0], part[1]};
    for (int64_t i = 0; i < kVectors; i += 2) {
        const Floats even = part[i], odd = part[i + 1];
        most[0] = even > most[0] ? even : most[0];
        most[1] = odd > most[1] ? odd : most[1];
        unordered |= (even != even) | (odd != odd);
    }
    return largest_lane(most[0] > most[1] ? most[0] : most[1]);
}

// The largest logit of the row, NaN if there is one, and the largest of each chunk.
float largest(const float* logits, int64_t vocab, std::vector<float>& chunk_max) {
    chunk_max.clear();
    Chunk spare;
    Ints unordered{};
    float peak = -kInfinity;
    for (int64_t start = 0; start < vocab; start += kChunk) {
        chunk_max.push_back(largest_of(view_chunk(logits, start, vocab, spare), unordered));
        peak = chunk_max.back() > peak ? chunk_max.back() : peak;
    }
    return any_lane(unordered) ? std::numeric_limits<float>::quiet_NaN() : peak;
}

// The first id whose logit is `peak`, the largest of the row.
int64_t first_of(float peak, const float* logits, int64_t vocab, const std::vector<float>& chunk_max) {
    const int64_t start = (std::find(chunk_max.begin(), chunk_max.end(), peak) - chunk_max.begin()) * kChunk;
    return std::find(logits + start, logits + std::min(start + kChunk, vocab), peak) - logits;
}

// The k-th largest logit: a heap of the k best so far while k is small, else a selection on a copy.
float kth_largest(const float* logits, int64_t vocab, int64_t k, SamplerScratch& scratch) {
    std::vector<float>& best = scratch.values;
    best.assign(logits, logits + (k > kHeapLimit ? vocab : k));
    if (k > kHeapLimit) {
        std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<>());
        return best[k - 1];
    }
    std::make_heap(best.begin(), best.end(), std::greater<>());
    for (int64_t start = k / kChunk * kChunk; start < vocab; start += kChunk) {
        if (scratch.chunk_max[start / kChunk] <= best.front()) continue;
        for (int64_t i = std::max(start, k); i < std::min(start + kChunk, vocab); ++i) {
            if (logits[i] <= best.front()) continue;
            std::pop_heap(best.begin(), best.end(), std::greater<>());
            best.back() = logits[i];
            std::push_heap(best.begin(), best.end(), std::greater<>());
        }
    }
    return best.front();
}

// The sum of a row's weights, or what is known of it.
struct Mass {
    int64_t least = 0;
    int64_t most = 0;
};

// exp((logit - peak) / temperature) of every kept token into scratch, and the sum of their weights. A chunk that stays
// below `cutoff` is not worked out: it adds between nothing and what it would if all of it were as large as its largest.
Mass weigh(
    const float* logits, int64_t vocab, float peak, float floor, float rate, float cutoff, SamplerScratch& scratch
) {
    scratch.values.resize((vocab + kChunk - 1) / kChunk * kChunk);
    const Floats least = Floats{} + floor;
    Mass mass;
    double skipped = 0.0;
    Chunk spare;
    for (int64_t start = 0; start < vocab; start += kChunk) {
        const float largest_here = (scratch.chunk_max[start / kChunk] - peak) * rate;
        if (largest_here < cutoff) {
            std::fill_n(scratch.values.data() + start, kChunk, 0.0f);
            if (largest_here >= kTiny) skipped += std::exp(static_cast<double>(largest_here));
            continue;
        }
        const LooseFloats* part = view_chunk(logits, start, vocab, spare);
        LooseFloats* out = reinterpret_cast<LooseFloats*>(scratch.values.data() + start);
        WeightSum sum;
        for (int64_t first = 0; first < kVectors; first += kAbreast) {
            Floats e[kAbreast];
            for (int64_t k = 0; k < kAbreast; ++k) e[k] = (part[first + k] - peak) * rate;
            exp_nonpositive(e);
            for (int64_t k = 0; k < kAbreast; ++k) {
                e[k] = part[first + k] >= least ? e[k] : Floats{};
                out[first + k] = e[k];
                sum.add(e[k]);
            }
        }
        mass.least += sum.total(kVectors);
    }
    mass.most = mass.least + static_cast<int64_t>(std::ceil(skipped * kChunk * kOne * (1.0 + 1e-5)));
    return mass;
}

// Tokens that can be in the nucleus: those that weigh at least `least`. A chunk whose largest logit is more than
// rounding below that is passed over.
void collect(const float* logits, int64_t vocab, int64_t least, double lowest_logit, SamplerScratch& scratch) {
    scratch.candidates.clear();
    const float bound = static_cast<float>(static_cast<double>(least) / kOne * kSlack);
    for (int64_t start = 0; start < vocab; start += kChunk) {
        if (scratch.chunk_max[start / kChunk] < lowest_logit) continue;
        for (int64_t i = start; i < std::min(start + kChunk, vocab); ++i) {
            if (scratch.values[i] < bound) continue;
            const int64_t weight = weight_of(scratch.values[i]);
            if (weight >= least) scratch.candidates.push_back({logits[i], weight});
        }
    }
}

// Take candidates from the most likely down, equals together, until those taken reach the limit. What is left of the
// heap stays one, so that a larger limit can go on from there.
struct Taking {
    int64_t above = 0;
    float floor = kInfinity;

    void until(std::vector<Candidate>& heap, double limit) {
        while (!heap.empty() && static_cast<double>(above) < limit) {
            floor = heap.front().logit;
            while (!heap.empty() && heap.front().logit == floor) {
                above += heap.front().weight;
                std::pop_heap(heap.begin(), heap.end(), below);
                heap.pop_back();
            }
        }
    }

    static bool below(const Candidate& a, const Candidate& b) { return a.logit < b.logit; }
};

// The floor if the mass were at its least and at its most; they differ only if chunks were left out that matter.
void nucleus_bounds(
    const float* logits, int64_t vocab, float peak, const RowShape& shape, const Mass& mass, SamplerScratch& scratch,
    float (&bounds)[2]
) {
    const double bound = (1.0 - shape.top_p) * static_cast<double>(mass.least) * (kSlack / static_cast<double>(vocab));
    const int64_t least = std::max<int64_t>(1, static_cast<int64_t>(std::floor(bound)));
    // A weight that rounds up to `least` can be half a unit less, and a logit's distance can be rounded too.
    const double reach = std::log((static_cast<double>(least) - 0.5) / kOne) * (1.0 + 1e-6) - 1e-4;
    collect(logits, vocab, least, peak + reach * shape.temperature, scratch);
    std::make_heap(scratch.candidates.begin(), scratch.candidates.end(), Taking::below);
    Taking taking;
    taking.until(scratch.candidates, shape.top_p * static_cast<double>(mass.least));
    bounds[0] = taking.floor;
    taking.until(scratch.candidates, shape.top_p * static_cast<double>(mass.most));
    bounds[1] = taking.floor;
}

// Most of a vocabulary is too unlikely to move the nucleus. So first leave out the chunks that hold none of its
// candidates; only if that leaves the floor open, work them all out.
float nucleus_floor(
    const float* logits, int64_t vocab, float peak, float floor, const RowShape& shape, SamplerScratch& scratch
) {
    const float rate = static_cast<float>(1.0 / shape.temperature);
    const double lightest = std::log(std::max((1.0 - shape.top_p) / static_cast<double>(vocab), 1e-30));
    const float cutoff = std::max(kTiny, static_cast<float>(lightest) - 1.0f);
    float bounds[2];
    Mass mass = weigh(logits, vocab, peak, floor, rate, cutoff, scratch);
    nucleus_bounds(logits, vocab, peak, shape, mass, scratch, bounds);
    if (bounds[0] != bounds[1]) {
        mass = weigh(logits, vocab, peak, floor, rate, kTiny, scratch);
        nucleus_bounds(logits, vocab, peak, shape, mass, scratch, bounds);
    }
    return bounds[0];
}

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

}  // namespace

uint64_t row_key(uint64_t stem, int64_t position) {
    return mix((stem + kGamma) ^ static_cast<uint64_t>(position));
}

RowShape checked_shape(double temperature, int64_t top_k, double top_p, double min_p) {
    if (!(temperature >= 0)) throw std::invalid_argument("the temperature must be at least 0");
    if (top_k < 1) throw std::invalid_argument("top_k must be at least 1; the vocabulary size keeps every token");
    if (!(top_p > 0)) throw std::invalid_argument("top_p must be above 0");
    if (!(min_p >= 0 && min_p <= 1)) throw std::invalid_argument("min_p must be in 0 .. 1");
    return {temperature, top_k, top_p, min_p};
}

RowFloor row_floor(const float* logits, int64_t vocab, const RowShape& shape, SamplerScratch& scratch) {
    const float peak = largest(logits, vocab, scratch.chunk_max);
    if (!std::isfinite(peak)) return {peak, kInfinity, -1};
    if (shape.temperature == 0) return {peak, peak, first_of(peak, logits, vocab, scratch.chunk_max)};
    float floor = kLowest;
    if (shape.top_k < vocab) floor = std::max(floor, kth_largest(logits, vocab, shape.top_k, scratch));
    if (shape.top_p < 1) floor = nucleus_floor(logits, vocab, peak, floor, shape, scratch);
    if (shape.min_p > 0) {
        const double relative = static_cast<double>(peak) + shape.temperature * std::log(shape.min_p);
        floor = std::max(floor, static_cast<float>(relative));
    }
    return {peak, floor, -1};
}

namespace {

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

float row_share(const float* logits, int64_t vocab, int64_t place, double temperature, const SamplerScratch& scratch) {
    constexpr float kNegligible = -20.0f;  // all of a vocabulary below this is no thousandth of the likeliest
    const float peak = *std::max_element(scratch.chunk_max.begin(), scratch.chunk_max.end());
    const float rate = static_cast<float>(1.0 / temperature);
    Floats sums{};
    Chunk spare;
    for (int64_t start = 0; start < vocab; start += kChunk) {
        if ((scratch.chunk_max[start / kChunk] - peak) * rate < kNegligible) continue;
        const LooseFloats* part = view_chunk(logits, start, vocab, spare);
        for (int64_t first = 0; first < kVectors; first += kAbreast) {
            Floats e[kAbreast];
            for (int64_t k = 0; k < kAbreast; ++k) e[k] = (part[first + k] - peak) * rate;
            exp_nonpositive(e);
            sums += (e[0] + e[1]) + (e[2] + e[3]);
        }
    }
    float sum = 0.0f;
    for (int64_t lane = 0; lane < kLanes; ++lane) sum += sums[lane];
    return std::exp((logits[place] - peak) * rate) / sum;
}

// One row is not worth waking another thread for.
template <typename Row>
void Sampler::each_row(int64_t rows, Row&& row) {
    pool_.require_own_process();
    std::lock_guard<std::mutex> lock(busy_);
    if (rows == 1) return row(0, scratch_[0]);
    pool_.run([&](int thread) {
        pool_.share(rows, 1, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) row(r, scratch_[thread]);
        });
    });
}

void Sampler::floors(
    const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowShape* shapes, RowFloor* found
) {
    each_row(rows, [&](int64_t row, SamplerScratch& scratch) {
        found[row] = row_floor(logits + row * stride, vocab, shapes[row], scratch);
    });
}

void Sampler::draw(
    const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowDraw* wanted, int64_t* tokens
) {
    each_row(rows, [&](int64_t row, SamplerScratch& scratch) {
        largest(logits + row * stride, vocab, scratch.chunk_max);
        tokens[row] = row_draw(logits + row * stride, vocab, wanted[row], scratch.chunk_max);
    });
}

void Sampler::sample(
    const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowShape* shapes, const uint64_t* keys,
    const RowGuesses* guesses, RowToken* found
) {
    const auto parent_of = [&](int64_t row) { return guesses ? guesses->parents[row] : -1; };
    std::vector<int64_t> starts;  // of texts, which threads take one by one
    for (int64_t row = 0; row < rows; ++row) {
        if (parent_of(row) < 0) starts.push_back(row);
    }
    const auto texts = static_cast<int64_t>(starts.size());
    starts.push_back(rows);
    each_row(texts, [&](int64_t text, SamplerScratch& scratch) {
        for (int64_t row = starts[text]; row < starts[text + 1]; ++row) {
            const int64_t parent = parent_of(row), before = parent < 0 ? 0 : found[parent].token;
            const bool is_wanted = before >= 0 && (parent < 0 || guesses->tokens[row] < 0 || guesses->tokens[row] == before);
            found[row] = is_wanted ? row_sample(logits + row * stride, vocab, shapes[row], keys[row], scratch)
                                   : RowToken{-1, RowStatus::kOk};
        }
    });
}

}  // namespace foreword
