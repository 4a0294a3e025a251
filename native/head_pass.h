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
    // Sets the stream from the features, through their norms and `fc`; the head's own states are copied.
    void reduce_features(int thread);
    void join_concat(int thread);
    void join_fused(int thread);
    // Stores the keys and values of every layer from the target's features, and computes nothing else.
    void store_context(int thread);
    void embed_tokens();
    void embed(int64_t row, float* out) const;
    // Copies the values if the weight is empty.
    void norm(const float* values, const std::vector<float>& weight, int64_t size, float* out) const;
    void compute_logits_and_states(int thread);

    Head& head_;
    const float* features_;
    bool are_own_states_;
    float* logits_;
    float* states_;
};

// Adds the Markov head's logits for the position after each token to logits [tokens, draft vocab].
class MarkovPass : private StackPass {
public:
    MarkovPass(Head& head, const Batch& previous_tokens, KvStore& store, size_t kind, float* logits);
    void run();

private:
    Head& head_;
    float* logits_;
};

// Projects states [rows, hidden] as the selector reads them. Writes [rows, rank].
class SelectorPass : private StackPass {
public:
    SelectorPass(Head& head, const Batch& rows, KvStore& store, size_t kind, const float* states, float* projected);
    void run();

private:
    Head& head_;
    const float* states_;
    float* projected_;
};

}  // namespace foreword
