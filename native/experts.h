// A mixture of experts: which of them a row takes, and their weights.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "packed_matrix.h"

namespace foreword {

using Matrix = std::shared_ptr<PackedMatrix>;

// How a row's experts are chosen from its scores.
struct Routing {
    int64_t per_token;        // experts that a row takes
    bool sigmoid;             // scores are sigmoids of the logits, else their softmax
    bool normalize;           // what the taken ones count sums to one
    float scale;              // of what they count, after that
    int64_t groups;
    int64_t top_groups;       // groups that a row may take experts from
    int64_t counted;          // a group is worth the sum of its so many best experts
};

struct Experts {
    Routing routing;
    Matrix router;                       // [experts, hidden], floats
    std::vector<float> correction;       // [experts], added to scores for the choice; empty: nothing is
    std::vector<float> shared_gate;      // [hidden]; empty: what the shared experts say counts in full
    std::vector<Matrix> gate, up, down;  // of every expert; without `up`, gates are multiplied with nothing
    float limit = 0.0f;                  // that gate and up are clamped to; 0: they are not, and the activation is SiLU
    float slope = 0.0f;                  // of the sigmoid of a clamped gate

    int64_t count() const { return static_cast<int64_t>(gate.size()); }
    int64_t size() const { return gate.front()->view().rows; }
    int64_t bytes() const;
    // Throws unless the parts fit each other and rows of `hidden` numbers.
    void check(int64_t hidden) const;
    // The experts of a row and how much each counts, from its logits, which are overwritten. Of experts with the same
    // score those with the lower numbers are taken. `choice` has room for a number per expert.
    void choose(float* logits, float* choice, int32_t* chosen, float* share) const;
};

}  // namespace foreword
