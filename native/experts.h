// A mixture of experts: the rule that chooses a row's experts, and the experts' weights.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "packed_matrix.h"

namespace foreword {

using Matrix = std::shared_ptr<PackedMatrix>;

// How a row's experts are chosen from the router's logits. An expert's weight is the factor of its output.
struct Routing {
    int64_t per_token;        // experts per row
    bool uses_sigmoid;        // scores are the sigmoids of the logits; else their softmax
    bool normalizes;          // the weights of a row's experts are divided by their sum
    float scale;              // factor of the weights, applied last
    int64_t groups;           // of consecutive experts
    int64_t top_groups;       // groups from which a row may take experts
    int64_t group_top_experts;   // the score of a group is the sum of this many best scores in it
};

struct Experts {
    Routing routing;
    Matrix router;                       // [experts, hidden], float32
    std::vector<float> correction;       // [experts], added to the scores for the choice, not for the weights; empty: none
    std::vector<float> shared_gate;      // [hidden], gate of the shared experts' output; empty: their factor is 1
    std::vector<Matrix> gate, up, down;  // [experts]; `up` is empty if the activation is a squared ReLU
    float limit = 0.0f;                  // gate and up are clamped to it (KernelTable::clamped_mul); 0: the layer's activation
    float slope = 0.0f;                  // of the sigmoid of a clamped gate

    int64_t count() const { return static_cast<int64_t>(gate.size()); }
    int64_t width() const { return gate.front()->view().rows; }   // of an expert's intermediate activations
    int64_t bytes() const;
    // Throws std::invalid_argument unless the sizes fit each other and rows of `hidden` values.
    void check(int64_t hidden) const;
    // Writes a row's experts and their weights, [per_token] each. Overwrites `logits` [experts] by the scores, and
    // `choice_scores` [experts], which is scratch. Of experts with equal scores those with lower indices are chosen.
    void choose(float* logits, float* choice_scores, int32_t* chosen, float* weights) const;
};

}  // namespace foreword
