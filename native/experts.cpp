#include "experts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "stack.h"

namespace foreword {

namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

// Returns the index of the largest value; of equal values the first.
int64_t argmax(const float* values, int64_t count) {
    return std::max_element(values, values + count) - values;
}

// Returns the sum of a group's `top_experts` best scores.
float group_score(const float* scores, int64_t count, int64_t top_experts) {
    std::vector<float> remaining(scores, scores + count);
    float sum = 0.0f;
    for (int64_t i = 0; i < top_experts; ++i) {
        const int64_t index = argmax(remaining.data(), count);
        sum += remaining[static_cast<size_t>(index)];
        remaining[static_cast<size_t>(index)] = kExcluded;
    }
    return sum;
}

// Excludes the experts of all but the best groups.
void exclude_other_groups(const Routing& routing, float* choice_scores, int64_t count) {
    const int64_t group_size = count / routing.groups;
    std::vector<float> scores(static_cast<size_t>(routing.groups));
    for (int64_t g = 0; g < routing.groups; ++g) {
        scores[static_cast<size_t>(g)] = group_score(choice_scores + g * group_size, group_size, routing.group_top_experts);
    }
    std::vector<bool> kept(scores.size(), false);
    for (int64_t i = 0; i < routing.top_groups; ++i) {
        const size_t group = static_cast<size_t>(argmax(scores.data(), routing.groups));
        kept[group] = true;
        scores[group] = kExcluded;
    }
    for (int64_t e = 0; e < count; ++e) {
        if (!kept[static_cast<size_t>(e / group_size)]) choice_scores[e] = kExcluded;
    }
}

// Replaces logits by scores.
void compute_scores(bool uses_sigmoid, float* logits, int64_t count) {
    if (uses_sigmoid) {
        for (int64_t e = 0; e < count; ++e) logits[e] = 1.0f / (1.0f + std::exp(-logits[e]));
        return;
    }
    const float highest = *std::max_element(logits, logits + count);
    float sum = 0.0f;
    for (int64_t e = 0; e < count; ++e) sum += logits[e] = std::exp(logits[e] - highest);
    for (int64_t e = 0; e < count; ++e) logits[e] /= sum;
}

}  // namespace

int64_t Experts::bytes() const {
    size_t total = router->bytes();
    for (const std::vector<Matrix>* matrices : {&gate, &up, &down}) {
        for (const Matrix& matrix : *matrices) total += matrix->bytes();
    }
    return static_cast<int64_t>(total);
}

void Experts::check(int64_t hidden) const {
    require(!gate.empty() && (up.empty() || gate.size() == up.size()) && gate.size() == down.size(),
            "every expert has three matrices, or two without an up projection");
    require_matrix(router, count(), hidden, "the router has the wrong shape");
    require(router->view().format == WeightFormat::F32, "the router must be float32");
    for (size_t e = 0; e < gate.size(); ++e) {
        require_matrix(gate[e], width(), hidden, "an expert's gate projection has the wrong shape");
        if (!up.empty()) require_matrix(up[e], width(), hidden, "an expert's up projection has the wrong shape");
        require_matrix(down[e], hidden, width(), "an expert's down projection has the wrong shape");
        require(share_input_format(*gate[e], *gate[0]) && (up.empty() || share_input_format(*up[e], *gate[0])) &&
                    share_input_format(*down[e], *down[0]),
                "experts must read the same input format");
    }
    require(routing.groups > 0 && count() % routing.groups == 0, "groups must divide the experts");
    const int64_t group_size = count() / routing.groups;
    require(routing.top_groups > 0 && routing.top_groups <= routing.groups, "a row takes experts from more groups than there are");
    require(routing.group_top_experts > 0 && routing.group_top_experts <= group_size, "the score of a group needs more experts than a group has");
    require(routing.per_token > 0 && routing.per_token <= group_size * routing.top_groups, "a row takes more experts than its groups have");
    require_norm(correction, count(), true, "the correction has one value per expert");
    require_norm(shared_gate, hidden, true, "the shared experts' gate has one weight per hidden dimension");
}

void Experts::choose(float* logits, float* choice_scores, int32_t* chosen, float* weights) const {
    compute_scores(routing.uses_sigmoid, logits, count());
    for (int64_t e = 0; e < count(); ++e) choice_scores[e] = correction.empty() ? logits[e] : logits[e] + correction[static_cast<size_t>(e)];
    if (routing.groups > 1) exclude_other_groups(routing, choice_scores, count());
    float sum = 0.0f;
    for (int64_t i = 0; i < routing.per_token; ++i) {
        const int64_t expert = argmax(choice_scores, count());
        choice_scores[expert] = kExcluded;
        chosen[i] = static_cast<int32_t>(expert);
        weights[i] = logits[expert];
        sum += weights[i];
    }
    for (int64_t i = 0; i < routing.per_token; ++i) {
        if (routing.normalizes) weights[i] /= sum + 1e-20f;
        weights[i] *= routing.scale;
    }
}

}  // namespace foreword
