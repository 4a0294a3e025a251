// Sampling kernels: the floor of a row's kept logits, and a draw from what it keeps.
// The torch code in src/foreword/acceptance (distribution.py) is the reference.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "thread_pool.h"

namespace nanobind {
class module_;
}

namespace foreword {

struct RowShape {
    double temperature;  // 0 is greedy
    int64_t top_k;       // the vocabulary size where there is no limit
    double top_p;
    double min_p;
};

// The shape of a row; throws std::invalid_argument for numbers that no row can be cut down by.
RowShape checked_shape(double temperature, int64_t top_k, double top_p, double min_p);

struct RowFloor {
    float peak;     // largest logit, NaN if any logit is NaN
    float floor;    // smallest kept logit
    int64_t first;  // first id of the largest logit
};

struct RowDraw {
    float peak;
    float floor;
    double temperature;
    int64_t only;  // the one token of a greedy row, or -1
    uint64_t key;
};

// What comes of a row: its token, or why it has none. The numbers are RowStatus's in src/foreword/acceptance/batch.py.
enum class RowStatus : int64_t { kOk = 0, kNotFinite = 1, kAllMasked = 2 };

struct RowToken {
    int64_t token;  // -1 unless the status is kOk
    RowStatus status;
};

struct Candidate {
    float logit;
    int64_t weight;
};

// Memory that one thread uses again and again.
struct SamplerScratch {
    std::vector<float> values;
    std::vector<float> chunk_max;
    std::vector<Candidate> candidates;
};

// The key of a row's noise: what its request's numbers start from, and the position that the row is about.
uint64_t row_key(uint64_t stem, int64_t position);

// The largest logit of a row, NaN if any is; `chunk_max` gets those of its chunks.
float largest(const float* logits, int64_t vocab, std::vector<float>& chunk_max);

RowFloor row_floor(const float* logits, int64_t vocab, const RowShape& shape, SamplerScratch& scratch);

// Where a row has logits of some tokens only: what tells their noise apart, as `row_draw` takes it. Noise belongs to a
// token, not to its place.
std::vector<uint64_t> noise_steps(const int32_t* ids, int64_t count);

// The kept token with the largest (logit - peak) / temperature + Gumbel noise; -1 if none is kept. `chunk_max` is what
// row_floor left of this row in its scratch memory, `steps` null where a place is a token's id.
int64_t row_draw(
    const float* logits, int64_t vocab, const RowDraw& draw, const std::vector<float>& chunk_max, const uint64_t* steps = nullptr
);

// Both, one after the other; the token is a place in the row.
RowToken row_sample(
    const float* logits, int64_t vocab, const RowShape& shape, uint64_t key, SamplerScratch& scratch, const uint64_t* steps = nullptr
);

// The part of exp(logit / temperature) that one place has of a row that row_floor has just gone through.
float row_share(const float* logits, int64_t vocab, int64_t place, double temperature, const SamplerScratch& scratch);

// Guesses of some texts, a row each behind the row of the text's end. What is drawn after a row is wanted only where all
// guesses on the way to it were drawn, too.
struct RowGuesses {
    const int64_t* parents;  // [rows], the row before, which comes first; -1 at the ends of texts
    const int64_t* tokens;   // [rows], the guess; below 0: not known yet
};

// Rows shared out among threads; what a row gives depends on the row alone.
class Sampler {
public:
    explicit Sampler(int threads) : pool_(threads), scratch_(threads) {}

    void floors(const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowShape* shapes, RowFloor* found);
    void draw(const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowDraw* wanted, int64_t* tokens);
    // With guesses, those rows alone whose draws are wanted: the others get the token -1. Null: all of them.
    void sample(
        const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowShape* shapes, const uint64_t* keys,
        const RowGuesses* guesses, RowToken* found
    );

private:
    template <typename Row>
    void each_row(int64_t rows, Row&& row);

    std::mutex busy_;  // one call at a time
    ThreadPool pool_;
    std::vector<SamplerScratch> scratch_;
};

void register_sampler(nanobind::module_& module);

}  // namespace foreword
