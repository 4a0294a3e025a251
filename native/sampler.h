// Sampling kernels: the floor of a row's kept logits, and a draw from what it keeps.
// The torch code in src/foreword/acceptance (distribution.py, nucleus.py, draw.py) is the reference.
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

RowFloor row_floor(const float* logits, int64_t vocab, const RowShape& shape, SamplerScratch& scratch);

// The kept token with the largest (logit - peak) / temperature + Gumbel noise; -1 if none is kept.
int64_t row_draw(const float* logits, int64_t vocab, const RowDraw& draw);

// Rows shared out among threads; what a row gives depends on the row alone.
class Sampler {
public:
    explicit Sampler(int threads) : pool_(threads), scratch_(threads) {}

    void floors(const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowShape* shapes, RowFloor* found);
    void draw(const float* logits, int64_t rows, int64_t stride, int64_t vocab, const RowDraw* wanted, int64_t* tokens);

private:
    std::mutex busy_;  // one call at a time
    ThreadPool pool_;
    std::vector<SamplerScratch> scratch_;
};

void register_sampler(nanobind::module_& module);

}  // namespace foreword
