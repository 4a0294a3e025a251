// A decoder of the llama family: its packed weights, threads and adapters.
#pragma once

#include "stack.h"

namespace foreword {

struct EndScales {
    float embedding = 1.0f, logits = 1.0f;   // factors of the embeddings and of the logits
    float softcap = 0.0f;                    // of the logits; 0: none
};

// Rows of an early exit, which is a decoder of the target's first layers and one more layer. The target's layers use the target's
// KV rows; the last layer has its own kind of KV rows.
struct ExitRows {
    Batch batch;
    const int32_t* starts;   // [requests], first KV row that is visible to the last layer
    const float* states;     // [rows, hidden size], input of the last layer, which only stores KV rows; null: run all layers
};

class Decoder : public Stack {
public:
    Decoder(int64_t vocab_size, StackShape shape, EndScales scales, const KernelTable& kernels, int threads, Rope rope);

    void add_layer(Layer layer);
    void set_embedding_and_output(Matrix embedding, Matrix head, std::vector<float> final_norm);

    // Runs a pass. Writes logits [logit rows, vocab] and hidden [hidden rows, taps * hidden size]. The store's first kind of
    // rows is this decoder's. `states` is null if no layer is recurrent. To `shares` [requests, heads, 2, parts], unless it is
    // null, all layers without a window add; then every request has one row.
    void forward(const Batch& batch, KvStore& store, StateStore* states, float* logits, float* hidden, float* shares, int64_t share_parts);

    // Runs a pass of an early exit, whose last layer has rows of `kind`. Writes logits [logit rows, vocab]; there are none if
    // the rows have states.
    void exit(const ExitRows& rows, KvStore& store, size_t kind, float* logits);

    // Sets the adapter of a slot from 1 on; null removes it. Waits until no pass is running.
    void set_adapter(int64_t slot, std::shared_ptr<const Adapter> adapter);

    int64_t vocab_size() const { return vocab_size_; }
    int64_t weight_bytes() const;

private:
    friend class Pass;
    void check(const Batch& batch, const KvStore& store) const;
    void check_exit(const ExitRows& rows, const KvStore& store, size_t kind) const;
    void check_adapter(const Adapter& adapter) const;
    // Returns the rows with an adapter; throws std::invalid_argument if a slot is empty.
    std::vector<AdaptedRows> adapted_rows(const Batch& batch) const;

    int64_t vocab_size_;
    EndScales scales_;
    Matrix embedding_, head_;
    std::vector<float> final_norm_;
    std::vector<std::shared_ptr<const Adapter>> adapters_;   // by slot
};

}  // namespace foreword
