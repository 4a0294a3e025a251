// Guesses of a head one after the other, without going back to Python between them.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>

#include "batch.h"
#include "sampler.h"

namespace foreword {

// How sure a head is of its guesses, and from where on going on is not worth it.
struct ChainStop {
    const float* edges;              // [classes - 1], of what it gives a guess, rising
    int64_t classes;
    const float* rates;              // [requests, classes], how often guesses of a class are right
    const float* least;              // [requests, most], chance that all guesses so far are right below which a chain ends there
    float* confidence;               // [requests, most], what it gives each guess: written
};

// The target's ids of a head's tokens, and what follows from them.
struct HeadTokens {
    std::vector<int32_t> ids;        // [draft vocab]
    std::vector<uint64_t> steps;     // [draft vocab], see `noise_steps`
    int64_t largest;

    HeadTokens(const int32_t* first, int64_t count);
    bool are(const int32_t* others) const { return std::equal(ids.begin(), ids.end(), others); }
};

struct ChainPlan {
    const int32_t* lengths;          // [requests], tokens of each text
    const int32_t* steps;            // [requests], guesses that are wanted of each, at most `most`
    std::shared_ptr<const HeadTokens> known;  // null: the head's tokens have the target's ids
    int64_t vocab;                   // the target's ids below this can be drawn
    int64_t most;
    bool has_strangers;              // whether the head knows tokens that cannot be drawn
    std::vector<RowShape> shapes;    // [requests]
    std::vector<uint64_t> stems;     // [requests], what the noise of each starts from
    std::optional<ChainStop> stop;   // none: nobody asks

    // How often a guess is right that was given this.
    float rate(int64_t request, float confidence) const;
    int64_t id_of(int64_t column) const { return known ? known->ids[static_cast<size_t>(column)] : column; }
};

// The rows of one level: a guess for each of some requests, behind its text and its guesses before.
class ChainLevel {
public:
    // `batch` has the pages of all requests.
    ChainLevel(const Batch& batch, const ChainPlan& plan) : all_(batch), plan_(plan) {}

    void begin(int64_t level);
    void add(int64_t request, int32_t token, const int32_t* starts);
    // Holds until the next `begin`.
    Batch view();

    const int32_t* starts() const { return starts_.data(); }
    const std::vector<int64_t>& requests() const { return requests_; }

private:
    const Batch& all_;
    const ChainPlan& plan_;
    int64_t level_ = 0;
    std::vector<int64_t> requests_, masks_;
    std::vector<int32_t> tokens_, positions_, slots_, prefixes_, row_starts_, tables_, kv_lens_, rows_, starts_;
};

// A token of the head's vocabulary, as the target's id; -1 if there is none. `masked` is memory for a row of logits.
// What the head gives it goes to the plan's `stop`.
int32_t draw_guess(const float* logits, int64_t draft_vocab, const ChainPlan& plan, int64_t request, int64_t level,
                   SamplerScratch& scratch, std::vector<float>& masked);

}  // namespace foreword
