// Chains of draft tokens of a head, drafted level by level in one native call.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>

#include "batch.h"
#include "sampler.h"

namespace foreword {

// When chains stop early. A token's confidence is the head's probability of it, and selects a class.
struct ChainStop {
    const float* edges;              // [classes - 1], ascending confidences between the classes
    int64_t classes;
    const float* rates;              // [requests, classes], acceptance rate of the tokens of a class
    const float* min_chances;        // [requests, max depth], a chain ends at a level if it is accepted so far with a lower chance
    float* confidence;               // [requests, max depth], written: the confidence of each draft token
};

// The target's ids of a head's vocabulary, and numbers that are computed from them.
struct DraftVocabulary {
    std::vector<int32_t> ids;              // [draft vocab]
    std::vector<uint64_t> noise_steps;     // [draft vocab], see `noise_steps_of`
    int64_t largest;                       // of the ids

    DraftVocabulary(const int32_t* first, int64_t count);
    bool has_ids(const int32_t* others) const { return std::equal(ids.begin(), ids.end(), others); }
};

struct ChainPlan {
    const int32_t* lengths;          // [requests], tokens of each text
    const int32_t* depths;           // [requests], longest chain of each
    std::shared_ptr<const DraftVocabulary> vocabulary;   // null: the head's tokens have the target's ids
    int64_t vocab;                   // ids of the target from this one on are excluded
    int64_t max_depth;               // of all requests
    bool has_excluded_tokens;        // some tokens of the head are excluded
    std::vector<RowParams> params;   // [requests], sampling parameters
    std::vector<uint64_t> stems;     // [requests], seeds of the noise (row_key)
    std::optional<ChainStop> stop;   // none: chains have their full depths

    // Returns the acceptance rate of a token that the head gave this confidence.
    float rate(int64_t request, float confidence) const;
    // Returns the target's id of a token of the head.
    int64_t id_of(int64_t token) const { return vocabulary ? vocabulary->ids[static_cast<size_t>(token)] : token; }
};

// Builds the batch of one level: a row for each request whose chain goes on, with its newest draft token.
class ChainLevel {
public:
    // `first_batch` has the block tables of all requests.
    ChainLevel(const Batch& first_batch, const ChainPlan& plan) : first_batch_(first_batch), plan_(plan) {}

    // Begins an empty batch. Its rows have the tokens that were drafted at this level.
    void begin(int64_t level);
    // Adds a row. `starts` has the first visible KV row of all requests.
    void add(int64_t request, int32_t token, const int32_t* starts);
    // Returns the batch; it points into this object until the next `begin`.
    Batch batch();

    const int32_t* starts() const { return starts_.data(); }             // [rows]
    const std::vector<int64_t>& requests() const { return requests_; }   // [rows]

private:
    const Batch& first_batch_;
    const ChainPlan& plan_;
    int64_t level_ = 0;
    std::vector<int64_t> requests_, ancestor_masks_;
    std::vector<int32_t> tokens_, positions_, slots_, prefix_lens_, row_starts_, block_tables_, kv_lens_, logit_rows_, starts_;
};

// Draws a draft token from a row of the head's logits and writes its confidence, if the plan has a `stop`. Returns the target's
// id, or -1 if no token can be drawn. `masked` is scratch.
int32_t draw_draft_token(const float* logits, int64_t draft_vocab, const ChainPlan& plan, int64_t request, int64_t level,
                         SamplerScratch& scratch, std::vector<float>& masked);

}  // namespace foreword
