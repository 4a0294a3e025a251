// One pass of a draft head over a batch.
#pragma once

#include "head.h"
#include "stack_pass.h"

namespace foreword {

class HeadPass : private StackPass {
public:
    HeadPass(Head& head, const PassRows& rows, const float* features, bool are_own, float* logits, float* states);
    void run();

private:
    void work(int thread);
    void reduce_features(int thread);
    void join_side_by_side(int thread);
    void join_fused(int thread);
    void embed(int64_t row, float* out) const;
    void norm(const float* values, const std::vector<float>& weight, int64_t size, float* out) const;
    void finish(int thread);

    Head& head_;
    const float* features_;
    bool are_own_;
    float* logits_;
    float* states_;
};

}  // namespace foreword
