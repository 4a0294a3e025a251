#include "experts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "stack.h"

namespace foreword {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// The number of the best entry; of equal ones the first.
int64_t best(const float* values, int64_t count) {
    return std::max_element(values, values + count) - values;
}

float worth(const float* values, int64_t count, int64_t counted) {
    std::vector<float> left(values, values + count);
    float sum = 0.0f;
    for (int64_t i = 0; i < counted; ++i) {
        const int64_t place = best(left.data(), count);
        sum += left[static_cast<size_t>(place)];
        left[static_cast<size_t>(place)] = kNever;
    }
    return sum;
}

void keep_best_groups(const Routing& routing, float* choice, int64_t count) {
    const int64_t each = count / routing.groups;
    std::vector<float> worths(static_cast<size_t>(routing.groups));
    for (int64_t g = 0; g < routing.groups; ++g) worths[static_cast<size_t>(g)] = worth(choice + g * each, each, routing.counted);
    std::vector<bool> kept(worths.size(), false);
    for (int64_t i = 0; i < routing.top_groups; ++i) {
        const size_t group = static_cast<size_t>(best(worths.data(), routing.groups));
        kept[group] = true;
        worths[group] = kNever;
    }
    for (int64_t e = 0; e < count; ++e) {
        if (!kept[static_cast<size_t>(e / each)]) choice[e] = kNever;
    }
}

void make_scores(bool sigmoid, float* logits, int64_t count) {
    if (sigmoid) {
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
    for (const std::vector<Matrix>* all : {&gate, &up, &down}) {
        for (const Matrix& matrix : *all) total += matrix->bytes();
    }
    return static_cast<int64_t>(total);
}

void Experts::check(int64_t hidden) const {
    require(!gate.empty() && (up.empty() || gate.size() == up.size()) && gate.size() == down.size(),
            "every expert has three matrices, or two");
    require_matrix(router, count(), hidden, "the router has the wrong shape");
    require(router->view().form == Form::F32, "the router is kept in floats");
    for (size_t e = 0; e < gate.size(); ++e) {
        require_matrix(gate[e], size(), hidden, "an expert's gate projection has the wrong shape");
        if (!up.empty()) require_matrix(up[e], size(), hidden, "an expert's up projection has the wrong shape");
        require_matrix(down[e], hidden, size(), "an expert's down projection has the wrong shape");
        require(same_input(*gate[e], *gate[0]) && (up.empty() || same_input(*up[e], *gate[0])) && same_input(*down[e], *down[0]),
                "experts must be grouped alike");
    }
    require(routing.groups > 0 && count() % routing.groups == 0, "groups must divide the experts");
    const int64_t each = count() / routing.groups;
    require(routing.top_groups > 0 && routing.top_groups <= routing.groups, "there are not that many groups");
    require(routing.counted > 0 && routing.counted <= each, "a group has not that many experts");
    require(routing.per_token > 0 && routing.per_token <= each * routing.top_groups, "there are not that many experts to take");
    require_norm(correction, count(), true, "the correction has one number per expert");
    require_norm(shared_gate, hidden, true, "the shared experts' gate has one number per hidden dimension");
}

void Experts::choose(float* logits, float* choice, int32_t* chosen, float* share) const {
    make_scores(routing.sigmoid, logits, count());
    for (int64_t e = 0; e < count(); ++e) choice[e] = correction.empty() ? logits[e] : logits[e] + correction[static_cast<size_t>(e)];
    if (routing.groups > 1) keep_best_groups(routing, choice, count());
    float sum = 0.0f;
    for (int64_t i = 0; i < routing.per_token; ++i) {
        const int64_t expert = best(choice, count());
        choice[expert] = kNever;
        chosen[i] = static_cast<int32_t>(expert);
        share[i] = logits[expert];
        sum += share[i];
    }
    for (int64_t i = 0; i < routing.per_token; ++i) {
        if (routing.normalize) share[i] /= sum + 1e-20f;
        share[i] *= routing.scale;
    }
}

}  // namespace foreword
