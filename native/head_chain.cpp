#include "head_chain.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "types.h"

namespace foreword {

namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

// Copies the logits to `masked`, with -inf for excluded tokens.
const float* without_excluded_tokens(const float* logits, int64_t draft_vocab, const ChainPlan& plan, std::vector<float>& masked) {
    masked.assign(logits, logits + draft_vocab);
    for (int64_t token = 0; token < draft_vocab; ++token) {
        if (plan.id_of(token) >= plan.vocab) masked[static_cast<size_t>(token)] = kExcluded;
    }
    return masked.data();
}

}  // namespace

DraftVocabulary::DraftVocabulary(const int32_t* first, int64_t count)
    : ids(first, first + count), noise_steps(noise_steps_of(first, count)), largest(*std::max_element(ids.begin(), ids.end())) {}

float ChainPlan::rate(int64_t request, float confidence) const {
    const float* end = stop->edges + stop->classes - 1;
    return stop->rates[request * stop->classes + (std::upper_bound(stop->edges, end, confidence) - stop->edges)];
}

void ChainLevel::begin(int64_t level) {
    level_ = level;
    requests_.clear();
    ancestor_masks_.clear();
    for (std::vector<int32_t>* array : {&tokens_, &positions_, &slots_, &prefix_lens_, &row_starts_, &block_tables_, &kv_lens_, &logit_rows_,
                                        &starts_}) {
        array->clear();
    }
}

void ChainLevel::add(int64_t request, int32_t token, const int32_t* starts) {
    const auto position = static_cast<int32_t>(plan_.lengths[request] + level_);
    const int32_t* pages = first_batch_.block_tables + request * first_batch_.pages;
    const auto row = static_cast<int32_t>(requests_.size());
    requests_.push_back(request);
    ancestor_masks_.push_back(static_cast<int64_t>((uint64_t{2} << level_) - 1));   // all levels of the chain
    tokens_.push_back(token);
    positions_.push_back(position);
    slots_.push_back(static_cast<int32_t>(pages[position / kPageSize] * kPageSize + position % kPageSize));
    prefix_lens_.push_back(plan_.lengths[request]);
    row_starts_.push_back(row);
    block_tables_.insert(block_tables_.end(), pages, pages + first_batch_.pages);
    kv_lens_.push_back(position + 1);
    logit_rows_.push_back(row);
    starts_.push_back(starts[request]);
}

Batch ChainLevel::batch() {
    row_starts_.push_back(static_cast<int32_t>(requests_.size()));
    Batch batch;
    batch.ancestor_masks = ancestor_masks_.data();
    batch.token_ids = tokens_.data();
    batch.positions = positions_.data();
    batch.slots = slots_.data();
    batch.prefix_lens = prefix_lens_.data();
    batch.row_starts = row_starts_.data();
    batch.block_tables = block_tables_.data();
    batch.kv_lens = kv_lens_.data();
    batch.logit_rows = logit_rows_.data();
    batch.rows = batch.requests = batch.logit_count = static_cast<int64_t>(requests_.size());
    batch.pages = first_batch_.pages;
    return batch;
}

int32_t draw_draft_token(const float* logits, int64_t draft_vocab, const ChainPlan& plan, int64_t request, int64_t level,
                   SamplerScratch& scratch, std::vector<float>& masked) {
    const RowParams& params = plan.params[static_cast<size_t>(request)];
    if (plan.has_excluded_tokens) logits = without_excluded_tokens(logits, draft_vocab, plan, masked);
    const uint64_t key = row_key(plan.stems[static_cast<size_t>(request)], plan.lengths[request] + level);
    const uint64_t* noise_steps = plan.vocabulary ? plan.vocabulary->noise_steps.data() : nullptr;
    const int64_t token = row_sample(logits, draft_vocab, params, key, scratch, noise_steps).token;
    if (token < 0) return -1;
    if (plan.stop) {
        const double temperature = params.temperature == 0.0 ? 1.0 : params.temperature;
        plan.stop->confidence[request * plan.max_depth + level] = row_probability(logits, draft_vocab, token, temperature, scratch);
    }
    return static_cast<int32_t>(plan.id_of(token));
}

}  // namespace foreword
