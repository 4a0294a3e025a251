#include "head_chain.h"

#include <cmath>
#include <limits>

#include "types.h"

namespace foreword {

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// The target's id of a column; -1 if it cannot be drawn.
int64_t id_of(const ChainPlan& plan, int64_t column) {
    const int64_t id = plan.ids ? plan.ids[column] : column;
    return id < plan.vocab ? id : -1;
}

// The first largest of the columns that can be drawn; -1 if it is no number, or if any of them is none.
int64_t largest_column(const float* logits, int64_t draft_vocab, const ChainPlan& plan) {
    int64_t best = -1;
    for (int64_t column = 0; column < draft_vocab; ++column) {
        if (std::isnan(logits[column])) return -1;
        if ((best < 0 || logits[column] > logits[best]) && id_of(plan, column) >= 0) best = column;
    }
    return best >= 0 && std::isfinite(logits[best]) ? best : -1;
}

}  // namespace

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
                   SamplerScratch& scratch, std::vector<float>& spread) {
    const RowShape& shape = plan.shapes[static_cast<size_t>(request)];
    if (shape.temperature == 0.0) {
        const int64_t column = largest_column(logits, draft_vocab, plan);
        return column < 0 ? -1 : static_cast<int32_t>(id_of(plan, column));
    }
    spread.assign(static_cast<size_t>(plan.vocab), kNothing);
    for (int64_t column = 0; column < draft_vocab; ++column) {
        const int64_t id = id_of(plan, column);
        if (id >= 0) spread[static_cast<size_t>(id)] = logits[column];
    }
    const uint64_t key = row_key(plan.stems[static_cast<size_t>(request)], plan.lengths[request] + level);
    return static_cast<int32_t>(row_sample(spread.data(), plan.vocab, shape, key, scratch).token);
}

}  // namespace foreword
