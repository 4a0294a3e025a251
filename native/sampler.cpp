#include "sampler.h"

namespace foreword {

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
