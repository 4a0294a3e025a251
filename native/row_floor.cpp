// Computes the floor of a row: the smallest logit that top-k, top-p (the nucleus) and min-p keep.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>

#include "row_chunks.h"
#include "sampler.h"

namespace foreword {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::max();
// A token's weight is exp((logit - peak) / temperature) in units of 2^-40, as an integer, so that sums do not depend on order.
constexpr double kOne = 0x1p40;      // weight of the most likely token
constexpr float kSqrtOne = 0x1p20f;
constexpr float kZeroWeight = -28.5f;  // the weight of a smaller exponent rounds to 0
constexpr double kSlack = 1.0 - 1e-6;  // factor of bounds that must hold in spite of rounding
constexpr int64_t kHeapLimit = 512;    // the largest k for which a heap of the k best logits is used

inline float largest_lane(FloatVector v) {
    float largest = v[0];
    for (int64_t lane = 1; lane < kLanes; ++lane) largest = v[lane] > largest ? v[lane] : largest;
    return largest;
}

inline bool any_lane(IntVector v) {
    int32_t any = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) any |= v[lane];
    return any != 0;
}

// A sum of rounded weights in two parts, each of which fits a 32-bit lane: `high` counts units of 2^-20, and `low` counts units of
// 2^-40 for what remains of each weight. Adding kShift to a float leaves its integer part in the low bits; `total` subtracts the
// bits of kShift.
struct WeightSum {
    static constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
    BitVector high{};
    BitVector low{};

    void add(FloatVector exponentials) {
        const FloatVector scaled = exponentials * kSqrtOne;
        const FloatVector whole = scaled + kShift;
        const FloatVector rest = (scaled - (whole - kShift)) * kSqrtOne + kShift;
        high += bits_as<BitVector>(whole);
        low += bits_as<BitVector>(rest);
    }

    // `vectors` is the number of calls of `add`.
    int64_t total(int64_t vectors) const {
        const uint32_t offset = static_cast<uint32_t>(vectors) * bits_as<uint32_t>(kShift);
        int64_t sum = 0;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const auto high_part = static_cast<int32_t>(high[lane] - offset);
            const auto low_part = static_cast<int32_t>(low[lane] - offset);
            sum += (int64_t{high_part} << 20) + low_part;
        }
        return sum;
    }
};

inline int64_t weight_of(float exponential) {
    return std::llrint(static_cast<double>(exponential) * kOne);
}

// Returns the largest logit of a chunk; sets lanes of `nan_lanes` if a logit is NaN.
inline float largest_of(const UnalignedFloats* chunk, IntVector& nan_lanes) {
    FloatVector largest[2] = {chunk[0], chunk[1]};
    for (int64_t i = 0; i < kVectors; i += 2) {
        const FloatVector even = chunk[i], odd = chunk[i + 1];
        largest[0] = even > largest[0] ? even : largest[0];
        largest[1] = odd > largest[1] ? odd : largest[1];
        nan_lanes |= (even != even) | (odd != odd);
    }
    return largest_lane(largest[0] > largest[1] ? largest[0] : largest[1]);
}

}  // namespace

float largest(const float* logits, int64_t vocab, std::vector<float>& chunk_max) {
    chunk_max.clear();
    Chunk padded;
    IntVector nan_lanes{};
    float peak = -kInfinity;
    for (int64_t start = 0; start < vocab; start += kChunk) {
        chunk_max.push_back(largest_of(view_chunk(logits, start, vocab, padded), nan_lanes));
        peak = chunk_max.back() > peak ? chunk_max.back() : peak;
    }
    return any_lane(nan_lanes) ? std::numeric_limits<float>::quiet_NaN() : peak;
}

namespace {

// Returns the first index whose logit is `peak`, the largest of the row.
int64_t first_index_of(float peak, const float* logits, int64_t vocab, const std::vector<float>& chunk_max) {
    const int64_t start = (std::find(chunk_max.begin(), chunk_max.end(), peak) - chunk_max.begin()) * kChunk;
    return std::find(logits + start, logits + std::min(start + kChunk, vocab), peak) - logits;
}

// Returns the k-th largest logit: from a heap of the k best logits if k is small, else by selection on a copy.
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

// Bounds of the sum of a row's weights.
struct Mass {
    int64_t lower = 0;
    int64_t upper = 0;
};

// Writes exp((logit - peak) / temperature) of every kept token to scratch.values, and returns the sum of the weights. `rate` is
// 1 / temperature. Chunks whose largest exponent is below `cutoff` are skipped: their sum is between 0 and kChunk times
// the weight of their largest logit.
Mass sum_weights(
    const float* logits, int64_t vocab, float peak, float floor, float rate, float cutoff, SamplerScratch& scratch
) {
    scratch.values.resize((vocab + kChunk - 1) / kChunk * kChunk);
    const FloatVector floors = FloatVector{} + floor;
    Mass mass;
    double skipped = 0.0;   // exponentials of the skipped chunks' largest logits
    Chunk padded;
    for (int64_t start = 0; start < vocab; start += kChunk) {
        const float largest_exponent = (scratch.chunk_max[start / kChunk] - peak) * rate;
        if (largest_exponent < cutoff) {
            std::fill_n(scratch.values.data() + start, kChunk, 0.0f);
            if (largest_exponent >= kZeroWeight) skipped += std::exp(static_cast<double>(largest_exponent));
            continue;
        }
        const UnalignedFloats* chunk = view_chunk(logits, start, vocab, padded);
        UnalignedFloats* out = reinterpret_cast<UnalignedFloats*>(scratch.values.data() + start);
        WeightSum sum;
        for (int64_t first = 0; first < kVectors; first += kInterleaved) {
            FloatVector e[kInterleaved];
            for (int64_t k = 0; k < kInterleaved; ++k) e[k] = (chunk[first + k] - peak) * rate;
            exp_nonpositive(e);
            for (int64_t k = 0; k < kInterleaved; ++k) {
                e[k] = chunk[first + k] >= floors ? e[k] : FloatVector{};
                out[first + k] = e[k];
                sum.add(e[k]);
            }
        }
        mass.lower += sum.total(kVectors);
    }
    mass.upper = mass.lower + static_cast<int64_t>(std::ceil(skipped * kChunk * kOne * (1.0 + 1e-5)));
    return mass;
}

// Sets scratch.candidates to the tokens whose weight is at least `least_weight`. Skips chunks whose largest logit is below
// `lowest_logit`.
void collect_candidates(const float* logits, int64_t vocab, int64_t least_weight, double lowest_logit, SamplerScratch& scratch) {
    scratch.candidates.clear();
    const float bound = static_cast<float>(static_cast<double>(least_weight) / kOne * kSlack);
    for (int64_t start = 0; start < vocab; start += kChunk) {
        if (scratch.chunk_max[start / kChunk] < lowest_logit) continue;
        for (int64_t i = start; i < std::min(start + kChunk, vocab); ++i) {
            if (scratch.values[i] < bound) continue;
            const int64_t weight = weight_of(scratch.values[i]);
            if (weight >= least_weight) scratch.candidates.push_back({logits[i], weight});
        }
    }
}

// A nucleus that grows from the most likely candidate down. Candidates with equal logits are added together.
struct Nucleus {
    int64_t mass = 0;
    float floor = kInfinity;

    // Moves candidates from the heap until their mass reaches the limit. The rest stays a heap, for a larger limit.
    void grow(std::vector<Candidate>& heap, double limit) {
        while (!heap.empty() && static_cast<double>(mass) < limit) {
            floor = heap.front().logit;
            while (!heap.empty() && heap.front().logit == floor) {
                mass += heap.front().weight;
                std::pop_heap(heap.begin(), heap.end(), is_less);
                heap.pop_back();
            }
        }
    }

    static bool is_less(const Candidate& a, const Candidate& b) { return a.logit < b.logit; }
};

// Writes two floors to `bounds`: that of the nucleus if the mass is at its lower bound, and if it is at its upper bound. They differ
// only if skipped chunks could change the floor.
void nucleus_bounds(
    const float* logits, int64_t vocab, float peak, const RowParams& params, const Mass& mass, SamplerScratch& scratch,
    float (&bounds)[2]
) {
    // The least likely token of the nucleus and all tokens outside it have together at least 1 - top_p of the mass. It is the
    // heaviest of them, so its weight is at least their mean.
    const double bound = (1.0 - params.top_p) * static_cast<double>(mass.lower) * (kSlack / static_cast<double>(vocab));
    const int64_t least_weight = std::max<int64_t>(1, static_cast<int64_t>(std::floor(bound)));
    // A weight that rounds up to `least_weight` can be half a unit smaller, and the logit's distance is rounded, too.
    const double lowest_exponent = std::log((static_cast<double>(least_weight) - 0.5) / kOne) * (1.0 + 1e-6) - 1e-4;
    collect_candidates(logits, vocab, least_weight, peak + lowest_exponent * params.temperature, scratch);
    std::make_heap(scratch.candidates.begin(), scratch.candidates.end(), Nucleus::is_less);
    Nucleus nucleus;
    nucleus.grow(scratch.candidates, params.top_p * static_cast<double>(mass.lower));
    bounds[0] = nucleus.floor;
    nucleus.grow(scratch.candidates, params.top_p * static_cast<double>(mass.upper));
    bounds[1] = nucleus.floor;
}

// Returns the floor of the nucleus. Most of a vocabulary is too unlikely to change it, so chunks without candidates are skipped at
// first. All chunks are summed only if the floor is uncertain after that.
float nucleus_floor(
    const float* logits, int64_t vocab, float peak, float floor, const RowParams& params, SamplerScratch& scratch
) {
    const float rate = static_cast<float>(1.0 / params.temperature);
    const double least_exponent = std::log(std::max((1.0 - params.top_p) / static_cast<double>(vocab), 1e-30));
    const float cutoff = std::max(kZeroWeight, static_cast<float>(least_exponent) - 1.0f);
    float bounds[2];
    Mass mass = sum_weights(logits, vocab, peak, floor, rate, cutoff, scratch);
    nucleus_bounds(logits, vocab, peak, params, mass, scratch, bounds);
    if (bounds[0] != bounds[1]) {
        mass = sum_weights(logits, vocab, peak, floor, rate, kZeroWeight, scratch);
        nucleus_bounds(logits, vocab, peak, params, mass, scratch, bounds);
    }
    return bounds[0];
}

}  // namespace

RowParams checked_params(double temperature, int64_t top_k, double top_p, double min_p) {
    if (!(temperature >= 0)) throw std::invalid_argument("the temperature must be at least 0");
    if (top_k < 1) throw std::invalid_argument("top_k must be at least 1; the vocabulary size keeps every token");
    if (!(top_p > 0)) throw std::invalid_argument("top_p must be above 0");
    if (!(min_p >= 0 && min_p <= 1)) throw std::invalid_argument("min_p must be in 0 .. 1");
    return {temperature, top_k, top_p, min_p};
}

RowFloor row_floor(const float* logits, int64_t vocab, const RowParams& params, SamplerScratch& scratch) {
    const float peak = largest(logits, vocab, scratch.chunk_max);
    if (!std::isfinite(peak)) return {peak, kInfinity, -1};
    if (params.temperature == 0) return {peak, peak, first_index_of(peak, logits, vocab, scratch.chunk_max)};
    float floor = kLowest;
    if (params.top_k < vocab) floor = std::max(floor, kth_largest(logits, vocab, params.top_k, scratch));
    if (params.top_p < 1) floor = nucleus_floor(logits, vocab, peak, floor, params, scratch);
    if (params.min_p > 0) {
        const double relative = static_cast<double>(peak) + params.temperature * std::log(params.min_p);
        floor = std::max(floor, static_cast<float>(relative));
    }
    return {peak, floor, -1};
}

float row_probability(const float* logits, int64_t vocab, int64_t index, double temperature, const SamplerScratch& scratch) {
    constexpr float kNegligible = -20.0f;  // exponents below this sum to less than a thousandth of the most likely token's
    const float peak = *std::max_element(scratch.chunk_max.begin(), scratch.chunk_max.end());
    const float rate = static_cast<float>(1.0 / temperature);
    FloatVector sums{};
    Chunk padded;
    for (int64_t start = 0; start < vocab; start += kChunk) {
        if ((scratch.chunk_max[start / kChunk] - peak) * rate < kNegligible) continue;
        const UnalignedFloats* chunk = view_chunk(logits, start, vocab, padded);
        for (int64_t first = 0; first < kVectors; first += kInterleaved) {
            FloatVector e[kInterleaved];
            for (int64_t k = 0; k < kInterleaved; ++k) e[k] = (chunk[first + k] - peak) * rate;
            exp_nonpositive(e);
            sums += (e[0] + e[1]) + (e[2] + e[3]);
        }
    }
    float sum = 0.0f;
    for (int64_t lane = 0; lane < kLanes; ++lane) sum += sums[lane];
    return std::exp((logits[index] - peak) * rate) / sum;
}

}  // namespace foreword
