// A decoder of the llama family: packed weights, and what a pass needs between calls.
#pragma once

#include "stack.h"

namespace foreword {

// What embeddings and logits are multiplied with, and what logits are squashed by; 0: nothing.
struct EndScales {
    float embedding = 1.0f, logits = 1.0f, softcap = 0.0f;
};

// Rows of an exit: its first layers are another decoder's, whose KV rows they read and write, its last one has a kind of its own.
struct ExitRows {
    Batch batch;
    const int32_t* starts;   // [requests], the first KV rows that its own layer sees
    const float* states;     // [rows, hidden size], after the lent layers: the rows are kept by its own; null: tokens are read
};

class Decoder : public Stack {
public:
    Decoder(int64_t vocab_size, StackShape shape, EndScales scales, const KernelTable& kernels, int threads, Rope rope);

    void add_layer(Layer layer);
    void set_ends(Matrix embedding, Matrix head, std::vector<float> final_norm);

    // logits [wanted, vocab]; hidden [hidden wanted, taps * hidden size]. The store's first kind of rows is this decoder's.
    // `states` is the memory of recurrent layers, null without any.
    void forward(const Batch& batch, KvStore& store, StateStore* states, float* logits, float* hidden);

    // The same for an exit, whose own layer has rows of `kind`; nothing comes of rows that are kept.
    void exit(const ExitRows& rows, KvStore& store, size_t kind, float* logits);

    // Slot 1 and up; null takes it away. Waits for the pass under way.
    void set_adapter(int64_t slot, std::shared_ptr<const Adapter> adapter);

    int64_t vocab_size() const { return vocab_size_; }
    int64_t weight_bytes() const;

private:
    friend class Pass;
    void check(const Batch& batch, const KvStore& store) const;
    void check_exit(const ExitRows& rows, const KvStore& store, size_t kind) const;
    void check_adapter(const Adapter& adapter) const;
    // The rows that something is added to; every slot of the batch is filled.
    std::vector<AdaptedRows> adapted_rows(const Batch& batch) const;

    int64_t vocab_size_;
    EndScales scales_;
    Matrix embedding_, head_;
    std::vector<float> final_norm_;
    std::vector<std::shared_ptr<const Adapter>> adapters_;   // by slot
};

}  // namespace foreword
