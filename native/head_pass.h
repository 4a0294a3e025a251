// One pass of a draft head over a batch.
#pragma once

#include "head.h"
#include "stack_pass.h"

namespace foreword {

class HeadPass : private StackPass {
public:
    HeadPass(Head& head, const HeadRows& rows, KvStore& store, size_t kind, float* logits, float* states);
    void run();

private:
    void work(int thread);
    void reduce_features(int thread);
    void join_side_by_side(int thread);
    void join_fused(int thread);
    // The target's features become keys and values of every layer; nothing else comes of them.
    void keep_context(int thread);
    void read_tokens();
    void embed(int64_t row, float* out) const;
    void norm(const float* values, const std::vector<float>& weight, int64_t size, float* out) const;
    void finish(int thread);

    Head& head_;
    const float* features_;
    bool are_own_;
    float* logits_;
    float* states_;
};

// Adds what the Markov head says behind some tokens to logits [tokens, draft vocab].
class MarkovPass : private StackPass {
public:
    MarkovPass(Head& head, const Batch& before, KvStore& store, size_t kind, float* logits);
    void run();

private:
    Head& head_;
    float* logits_;
};

}  // namespace foreword
