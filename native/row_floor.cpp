// The floor of a row's kept logits: top-k, nucleus and min-p.
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
constexpr double kOne = 0x1p40;  // the weight of the most likely token
constexpr float kHalfway = 0x1p20f;
constexpr float kTiny = -28.5f;  // below this a weight rounds to 0
constexpr double kSlack = 1.0 - 1e-6;
constexpr int64_t kHeapLimit = 512;

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

}  // namespace

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

namespace {

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

}  // namespace

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

}  // namespace foreword
