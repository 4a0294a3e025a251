#include "sampler.h"

namespace foreword {

template <typename Function>
void Sampler::for_each(int64_t count, Function&& function) {
    pool_.require_own_process();
    std::lock_guard<std::mutex> lock(busy_);
    if (count == 1) return function(0, scratch_[0]);  // faster than waking the other threads
    pool_.run([&](int thread) {
        pool_.parallel_for(count, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) function(i, scratch_[thread]);
        });
    });
}

void Sampler::floors(
    const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowParams* params, RowFloor* floors
) {
    for_each(rows, [&](int64_t row, SamplerScratch& scratch) {
        floors[row] = row_floor(logits + row * stride, vocab, params[row], scratch);
    });
}

void Sampler::draw(
    const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowDraw* draws, int64_t* tokens
) {
    for_each(rows, [&](int64_t row, SamplerScratch& scratch) {
        largest(logits + row * stride, vocab, scratch.chunk_max);  // fills `chunk_max`
        tokens[row] = row_draw(logits + row * stride, vocab, draws[row], scratch.chunk_max);
    });
}

void Sampler::sample(
    const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowParams* params, const uint64_t* keys,
    const DraftedRows* drafted, RowToken* results
) {
    const auto parent_of = [&](int64_t row) { return drafted ? drafted->parents[row] : -1; };
    std::vector<int64_t> starts;  // first rows of the texts; one thread samples all rows of a text
    for (int64_t row = 0; row < rows; ++row) {
        if (parent_of(row) < 0) starts.push_back(row);
    }
    const auto texts = static_cast<int64_t>(starts.size());
    starts.push_back(rows);
    for_each(texts, [&](int64_t text, SamplerScratch& scratch) {
        for (int64_t row = starts[text]; row < starts[text + 1]; ++row) {
            const int64_t parent = parent_of(row), sampled = parent < 0 ? 0 : results[parent].token;
            const bool is_reached = sampled >= 0 && (parent < 0 || drafted->tokens[row] < 0 || drafted->tokens[row] == sampled);
            results[row] = is_reached ? row_sample(logits + row * stride, vocab, params[row], keys[row], scratch)
                                      : RowToken{-1, RowStatus::kOk};
        }
    });
}

}  // namespace foreword
