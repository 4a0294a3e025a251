#include "head_chain.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "types.h"

namespace foreword {

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// The same logits without those of tokens that cannot be drawn.
const float* without_strangers(const float* logits, int64_t draft_vocab, const ChainPlan& plan, std::vector<float>& masked) {
    masked.assign(logits, logits + draft_vocab);
    for (int64_t column = 0; column < draft_vocab; ++column) {
        if (plan.id_of(column) >= plan.vocab) masked[static_cast<size_t>(column)] = kNothing;
    }
    return masked.data();
}

}  // namespace

HeadTokens::HeadTokens(const int32_t* first, int64_t count)
    : ids(first, first + count), steps(noise_steps(first, count)), largest(*std::max_element(ids.begin(), ids.end())) {}

float ChainPlan::rate(int64_t request, float confidence) const {
    const float* end = stop->edges + stop->classes - 1;
    return stop->rates[request * stop->classes + (std::upper_bound(stop->edges, end, confidence) - stop->edges)];
}

void ChainLevel::begin(int64_t level) {
    level_ = level;
    requests_.clear();
    masks_.clear();
    for (std::vector<int32_t>* array : {&tokens_, &positions_, &slots_, &prefixes_, &row_starts_, &tables_, &kv_lens_, &rows_, &starts_}) {
        array->clear();
    }
}

void ChainLevel::add(int64_t request, int32_t token, const int32_t* starts) {
    const auto row = static_cast<int32_t>(plan_.lengths[request] + level_);
    const int32_t* pages = all_.block_tables + request * all_.pages;
    const auto number = static_cast<int32_t>(requests_.size());
    requests_.push_back(request);
    masks_.push_back(static_cast<int64_t>((uint64_t{2} << level_) - 1));
    tokens_.push_back(token);
    positions_.push_back(row);
    slots_.push_back(static_cast<int32_t>(pages[row / kPageSize] * kPageSize + row % kPageSize));
    prefixes_.push_back(plan_.lengths[request]);
    row_starts_.push_back(number);
    tables_.insert(tables_.end(), pages, pages + all_.pages);
    kv_lens_.push_back(row + 1);
    rows_.push_back(number);
    starts_.push_back(starts[request]);
}

Batch ChainLevel::view() {
    row_starts_.push_back(static_cast<int32_t>(requests_.size()));
    Batch batch;
    batch.ancestor_masks = masks_.data();
    batch.token_ids = tokens_.data();
    batch.positions = positions_.data();
    batch.slots = slots_.data();
    batch.prefix_lens = prefixes_.data();
    batch.row_starts = row_starts_.data();
    batch.block_tables = tables_.data();
    batch.kv_lens = kv_lens_.data();
    batch.logit_rows = rows_.data();
    batch.rows = batch.requests = batch.wanted = static_cast<int64_t>(requests_.size());
    batch.pages = all_.pages;
    return batch;
}

int32_t draw_guess(const float* logits, int64_t draft_vocab, const ChainPlan& plan, int64_t request, int64_t level,
                   SamplerScratch& scratch, std::vector<float>& masked) {
    const RowShape& shape = plan.shapes[static_cast<size_t>(request)];
    if (plan.has_strangers) logits = without_strangers(logits, draft_vocab, plan, masked);
    const uint64_t key = row_key(plan.stems[static_cast<size_t>(request)], plan.lengths[request] + level);
    const int64_t column = row_sample(logits, draft_vocab, shape, key, scratch, plan.known ? plan.known->steps.data() : nullptr).token;
    if (column < 0) return -1;
    if (plan.stop) {
        const double temperature = shape.temperature == 0.0 ? 1.0 : shape.temperature;
        plan.stop->confidence[request * plan.most + level] = row_share(logits, draft_vocab, column, temperature, scratch);
    }
    return static_cast<int32_t>(plan.id_of(column));
}

}  // namespace foreword
