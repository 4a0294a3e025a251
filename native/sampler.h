// Sampling kernels: which tokens of a row of logits are kept, and drawing one of them.
// The reference is the torch code in src/foreword/acceptance/distribution.py.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "thread_pool.h"

namespace nanobind {
class module_;
}

namespace foreword {

struct RowParams {
    double temperature;  // 0 is greedy
    int64_t top_k;       // the vocabulary size: no limit
    double top_p;
    double min_p;
};

// Returns the parameters; throws std::invalid_argument if one is out of range.
RowParams checked_params(double temperature, int64_t top_k, double top_p, double min_p);

// The tokens that a row keeps are those whose logits are at least `floor`.
struct RowFloor {
    float peak;            // largest logit; NaN if a logit is NaN
    float floor;
    int64_t greedy_token;  // at temperature 0 the first token with the largest logit, else -1
};

struct RowDraw {
    float peak;
    float floor;
    double temperature;
    int64_t greedy_token;  // drawn without noise; -1: none
    uint64_t key;          // of the noise (row_key)
};

// Whether a token was drawn, or why not. The numbers are RowStatus's in src/foreword/acceptance/batch.py.
enum class RowStatus : int64_t { kOk = 0, kNotFinite = 1, kAllMasked = 2 };

struct RowToken {
    int64_t token;  // -1: none was drawn
    RowStatus status;
};

struct Candidate {
    float logit;
    int64_t weight;   // in units of 2^-40 of the most likely token's
};

// Memory that a thread keeps between rows.
struct SamplerScratch {
    std::vector<float> values;
    std::vector<float> chunk_max;   // largest logit of each chunk of the last row
    std::vector<Candidate> candidates;
};

// Returns the key of a row's noise from the seed of its request and the position of the predicted token.
uint64_t row_key(uint64_t stem, int64_t position);

// Returns the largest logit of a row, NaN if one is NaN, and writes the largest of each chunk.
float largest(const float* logits, int64_t vocab, std::vector<float>& chunk_max);

// Returns the floor of a row; sets `scratch.chunk_max`.
RowFloor row_floor(const float* logits, int64_t vocab, const RowParams& params, SamplerScratch& scratch);

// Noise depends on the row's key and the token's id. If the logits of a row are not those of the ids 0, 1, ..., these numbers
// replace the ids: one for each logit.
std::vector<uint64_t> noise_steps_of(const int32_t* ids, int64_t count);

// Returns the index of the kept logit with the largest (logit - peak) / temperature + Gumbel noise; -1 if none is kept.
// `chunk_max` is that of `row_floor` or `largest` for this row. `noise_steps` is null if indices are token ids.
int64_t row_draw(
    const float* logits, int64_t vocab, const RowDraw& draw, const std::vector<float>& chunk_max, const uint64_t* noise_steps = nullptr
);

// Computes the floor of a row and draws from it. The token is an index of the row.
RowToken row_sample(
    const float* logits, int64_t vocab, const RowParams& params, uint64_t key, SamplerScratch& scratch,
    const uint64_t* noise_steps = nullptr
);

// Returns the probability of one index, softmax(logit / temperature), in the last row that `row_floor` was called for.
float row_probability(const float* logits, int64_t vocab, int64_t index, double temperature, const SamplerScratch& scratch);

// Draft tokens of some texts. A text has one row for its end, then one for each of its draft tokens. The rows after a draft
// token are drawn only if the target draws that token.
struct DraftedRows {
    const int64_t* parents;  // [rows], row of the token before, always an earlier one; -1 at the end of a text
    const int64_t* tokens;   // [rows], the draft token; negative if it is not known yet
};

// Samples rows in several threads. A row's result depends only on the row.
class Sampler {
public:
    explicit Sampler(int threads) : pool_(threads), scratch_(threads) {}

    void floors(const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowParams* params, RowFloor* floors);
    void draw(const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowDraw* draws, int64_t* tokens);
    // With `drafted`, rows after a draft token that the target did not draw have the token -1; null: there are no draft tokens.
    void sample(
        const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowParams* params, const uint64_t* keys,
        const DraftedRows* drafted, RowToken* results
    );

private:
    // Calls `function(index, scratch)` for every index below `count`.
    template <typename Function>
    void for_each(int64_t count, Function&& function);

    std::mutex busy_;  // held during a call
    ThreadPool pool_;
    std::vector<SamplerScratch> scratch_;   // [threads]
};

void register_sampler(nanobind::module_& module);

}  // namespace foreword
