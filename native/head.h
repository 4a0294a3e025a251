// A draft head: a few layers that read a token and the features (target's hidden states) of the position before it.
#pragma once

#include "head_chain.h"
#include "stack.h"

namespace foreword {

// How a head combines a token's embedding with features.
enum class Join {
    Concat,    // both, concatenated, are the input of the first layer's attention
    Fused,     // both, concatenated, go through `fc`
    Context,   // features become keys and values of every layer, and other rows, which read only tokens, attend to them
};

struct HeadShape {
    int64_t draft_vocab_size;
    int64_t feature_width;          // of the target's features of one row
    Join join;
    bool norm_before_residual;      // Concat: the residual stream starts with the normed features
    bool norm_output;               // the states that the head reads as features of the next position are normed
};

// The weights that are applied before the first layer. Empty norms are not applied.
struct HeadInputs {
    Matrix fc;                                        // may be null
    // Norms of equal parts of the target's features: none, one, or one per tap.
    std::vector<std::vector<float>> feature_norms;
    std::vector<float> embedding_norm, hidden_norm;   // of the token's embedding; of the features after `fc` (before it if Fused)
};

// DFlash2's selector. A candidate's bonus is the sum of the products of three vectors: of the token before it, of the
// position's state, and of the candidate.
struct CandidateSelector {
    Matrix predecessor, successor;   // [ids, rank], [draft vocab, rank]; null: the head has no selector
    Matrix projection;               // [rank, hidden], of states
    int64_t candidates = 0;
    float logit_scale = 1.0f;
    float logit_cap = 0.0f;          // bound of the scaled logits; 0: none
    float embedding_scale = 1.0f;    // of the embeddings of a block's tokens
};

// Rows of one pass.
struct HeadRows {
    Batch batch;
    const int32_t* starts;    // [requests], first visible KV row
    const float* features;    // [rows, feature width]; [rows, hidden size] if they are the head's own states
    // The features are the head's own states. Under Join::Context: the rows read only tokens, and have no features.
    bool are_own_states;
};

class Head : public Stack {
public:
    // The head uses the decoder's threads; their passes exclude each other.
    Head(const Stack& decoder, HeadShape head_shape, StackShape shape, Rope rope);

    void set_inputs(HeadInputs inputs);
    void add_layer(Layer layer);
    void set_embedding_and_output(Matrix embedding, Matrix output, std::vector<float> final_norm);

    // Sets a Markov head, which adds output [draft vocab, rank] times row `token` of embedding [ids, rank] to the logits of
    // the position after `token`.
    void set_markov(Matrix embedding, Matrix output);

    // Sets the selector of DFlash2, which scores the best tokens of a position given the token before it.
    void set_selector(CandidateSelector selector);

    // Runs a pass. Writes logits [logit rows, draft vocab] and states [logit rows, hidden size].
    void forward(const HeadRows& rows, KvStore& store, size_t kind, float* logits, float* states);

    // Runs a pass and drafts a token after each request's logit row; then runs further passes, each of which drafts the next
    // token of the chains. Writes the target's ids to tokens [requests, plan.max_depth], padded with -1.
    void draft_chains(const HeadRows& rows, KvStore& store, size_t kind, const ChainPlan& plan, int32_t* tokens);

    // Join::Context. Stores the keys and values of `context` unless it is null, then runs a pass over blocks of mask tokens
    // and drafts a token at each of their logit rows. Writes tokens like `draft_chains`.
    void draft_blocks(const HeadRows* context, const HeadRows& blocks, KvStore& store, size_t kind, const ChainPlan& plan, int32_t* tokens);

    // Returns the vocabulary with these ids [draft vocab] of the target; caches the last one.
    std::shared_ptr<const DraftVocabulary> vocabulary(const int32_t* ids);

    const HeadShape& head_shape() const { return head_shape_; }
    // Width of a row of `HeadRows::features`.
    int64_t feature_width(bool are_own_states) const {
        if (are_own_states && head_shape_.join == Join::Context) return 0;
        return are_own_states ? shape_.hidden_size : head_shape_.feature_width;
    }

private:
    friend class HeadPass;
    friend class MarkovPass;
    friend class SelectorPass;
    struct DraftPosition {   // a position of a chain, and the logits of its token
        int64_t request, level;
        const float* logits;
        const float* projected = nullptr;   // its state, as the selector reads it
    };
    void check(const HeadRows& rows, const KvStore& store, size_t kind) const;
    void run(const HeadRows& rows, KvStore& store, size_t kind, float* logits, float* states);
    // Draws the tokens of these positions.
    void draw(const std::vector<DraftPosition>& positions, const ChainPlan& plan, int32_t* tokens);
    // Draws level by level, from logits that depend on the token of the level before: by the Markov head or the selector.
    void draw_by_level(const std::vector<DraftPosition>& positions, const HeadRows& blocks, KvStore& store, size_t kind,
                       const ChainPlan& plan, int32_t* tokens);
    // Replaces the logits of a position by the selector's: -inf but for the best candidates.
    void select(const DraftPosition& position, int32_t previous_token, const ChainPlan& plan, float* logits) const;

    HeadShape head_shape_;
    HeadInputs inputs_;
    Matrix embedding_, output_, markov_embedding_, markov_output_;
    std::vector<float> final_norm_;
    CandidateSelector selector_;
    std::shared_ptr<const DraftVocabulary> vocabulary_;
    // Buffers of chains and blocks, kept between calls.
    std::vector<float> logits_, states_, next_states_, level_logits_, projected_;
    std::vector<SamplerScratch> scratch_;       // [threads]
    std::vector<std::vector<float>> masked_;    // [threads], a row of logits without excluded tokens
};

}  // namespace foreword
