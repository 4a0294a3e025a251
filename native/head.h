// A draft head: a few layers that read a token and the features of the position before it.
#pragma once

#include "head_chain.h"
#include "stack.h"

namespace foreword {

// What becomes of the embedding of a token and of the features before it.
enum class Join {
    SideBySide,   // both go into the first layer's attention
    Fused,        // both go through `fc`
    Context,      // features are kept as keys and values of every layer, and looked at by rows that read a token alone
};

struct HeadShape {
    int64_t draft_vocab_size;
    int64_t feature_width;          // numbers of the target's features of one row
    Join join;
    bool norm_before_residual;      // side by side: the stream starts with the normed features
    bool norm_output;               // what it feeds itself is normed
};

// What the features go through before the first layer. Norms that are empty are not done.
struct HeadInputs {
    Matrix fc;                                        // may be null
    std::vector<std::vector<float>> feature_norms;    // of equal parts of the target's features: one, or one per tap
    std::vector<float> embedding_norm, hidden_norm;   // of what the first layer, or a fused `fc`, reads; of a context
};

// Rows of one pass with what they read beside their tokens.
struct HeadRows {
    Batch batch;
    const int32_t* starts;    // [requests], the first KV rows that are seen
    const float* features;    // [rows, feature width], or [rows, hidden size] if they are its own
    bool are_own;
};

class Head : public Stack {
public:
    // It runs on the decoder's threads and takes turns with it.
    Head(const Stack& decoder, HeadShape head, StackShape shape, Rope rope);

    void set_inputs(HeadInputs inputs);
    void add_layer(Layer layer);
    void set_ends(Matrix embedding, Matrix output, std::vector<float> final_norm);

    // What the token before says of the next: its row of `before` [ids, rank], through `after` [draft vocab, rank].
    void set_markov(Matrix before, Matrix after);

    // logits [wanted, draft vocab]; states [wanted, hidden size].
    void forward(const HeadRows& rows, KvStore& store, size_t kind, float* logits, float* states);

    // The same for texts whose newest token's outcome is wanted, and then guess after guess of its own: tokens
    // [requests, plan.most], the target's ids, -1 where there are no more.
    void chain(const HeadRows& rows, KvStore& store, size_t kind, const ChainPlan& plan, int32_t* tokens);

    // Keeps the context of committed tokens, if there is any to keep, and runs blocks whose wanted rows guess a token each.
    void block(const HeadRows* context, const HeadRows& blocks, KvStore& store, size_t kind, const ChainPlan& plan, int32_t* tokens);

    // The target's ids of its tokens, [draft vocab]; what follows from them is kept for the next time.
    std::shared_ptr<const HeadTokens> tokens(const int32_t* ids);

    const HeadShape& head() const { return head_; }
    // Width of one row of features.
    int64_t feature_width(bool are_own) const {
        if (are_own && head_.join == Join::Context) return 0;
        return are_own ? shape_.hidden_size : head_.feature_width;
    }

private:
    friend class HeadPass;
    friend class MarkovPass;
    struct Draw {   // one guess
        int64_t request, level;
        const float* logits;
    };
    void check(const HeadRows& rows, const KvStore& store, size_t kind) const;
    void run(const HeadRows& rows, KvStore& store, size_t kind, float* logits, float* states);
    void draw(const std::vector<Draw>& draws, const ChainPlan& plan, int32_t* tokens);
    // Guess after guess, with what the token before says added to the logits of each.
    void draw_behind(const std::vector<Draw>& draws, const HeadRows& blocks, KvStore& store, size_t kind, const ChainPlan& plan,
                     int32_t* tokens);

    HeadShape head_;
    HeadInputs inputs_;
    Matrix embedding_, output_, before_, after_;
    std::vector<float> final_norm_;
    std::shared_ptr<const HeadTokens> tokens_;
    // Of chains, kept between calls: outcomes, and what every thread draws with.
    std::vector<float> logits_, states_, next_states_, level_logits_;
    std::vector<SamplerScratch> scratch_;
    std::vector<std::vector<float>> masked_;
};

}  // namespace foreword
