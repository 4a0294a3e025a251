// A draft head: a few layers that read a token and the features of the position before it.
#pragma once

#include "head_chain.h"
#include "stack.h"

namespace foreword {

struct HeadShape {
    int64_t draft_vocab_size;
    int64_t feature_width;          // numbers of the target's features of one row
    bool fused;                     // embedding and features go through `fc` together; else side by side into attention
    bool norm_before_residual;      // side by side: the stream starts with the normed features
    bool norm_output;               // what it feeds itself is normed
};

// What the features go through before the first layer. Norms that are empty are not done.
struct HeadInputs {
    Matrix fc;                                        // may be null
    std::vector<std::vector<float>> feature_norms;    // of equal parts of the target's features: one, or one per tap
    std::vector<float> embedding_norm, hidden_norm;   // of what the first layer, or a fused `fc`, reads
};

class Head : public Stack {
public:
    // It runs on the decoder's threads and takes turns with it.
    Head(const Stack& decoder, HeadShape head, StackShape shape, Rope rope);

    void set_inputs(HeadInputs inputs);
    void add_layer(Layer layer);
    void set_ends(Matrix embedding, Matrix output, std::vector<float> final_norm);

    // features [rows, feature width], or [rows, hidden size] if they are its own; logits [wanted, draft vocab];
    // states [wanted, hidden size]. `starts` [requests] are the first KV rows that are seen.
    void forward(const Batch& batch, KvStore& store, size_t kind, const int32_t* starts, const float* features, bool are_own,
                 float* logits, float* states);

    // The same for texts whose newest token's outcome is wanted, and then guess after guess of its own: tokens
    // [requests, plan.most], the target's ids, -1 where there are no more.
    void chain(const Batch& batch, KvStore& store, size_t kind, const int32_t* starts, const float* features,
               const ChainPlan& plan, int32_t* tokens);

    const HeadShape& head() const { return head_; }
    // Width of one row of features.
    int64_t feature_width(bool are_own) const { return are_own ? shape_.hidden_size : head_.feature_width; }

private:
    friend class HeadPass;
    void check(const Batch& batch, const KvStore& store, size_t kind, const int32_t* starts) const;
    void run(const Batch& batch, KvStore& store, size_t kind, const int32_t* starts, const float* features, bool are_own,
             float* logits, float* states);
    // One guess for each of these requests, whose logits stand in this order.
    void draw(const std::vector<int64_t>& requests, const ChainPlan& plan, int64_t level, int32_t* tokens);

    HeadShape head_;
    HeadInputs inputs_;
    Matrix embedding_, output_;
    std::vector<float> final_norm_;
    // Of chains, kept between calls: outcomes, and what every thread draws with.
    std::vector<float> logits_, states_, next_states_;
    std::vector<SamplerScratch> scratch_;
    std::vector<std::vector<float>> spread_;
};

}  // namespace foreword
