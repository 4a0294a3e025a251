// A decoder of the llama family: packed weights, and what a pass needs between calls.
#pragma once

#include "stack.h"

namespace foreword {

// What embeddings and logits are multiplied with, and what logits are squashed by; 0: nothing.
struct EndScales {
    float embedding = 1.0f, logits = 1.0f, softcap = 0.0f;
};

class Decoder : public Stack {
public:
    Decoder(int64_t vocab_size, StackShape shape, EndScales scales, const KernelTable& kernels, int threads, Rope rope);

    void add_layer(Layer layer);
    void set_ends(Matrix embedding, Matrix head, std::vector<float> final_norm);

    // logits [wanted, vocab]; hidden [taps, hidden wanted, hidden size]. The store's first kind of rows is this decoder's.
    void forward(const Batch& batch, KvStore& store, float* logits, float* hidden);

    // Slot 1 and up; null takes it away. Waits for the pass under way.
    void set_adapter(int64_t slot, std::shared_ptr<const Adapter> adapter);

    int64_t vocab_size() const { return vocab_size_; }
    int64_t weight_bytes() const;

private:
    friend class Pass;
    void check(const Batch& batch, const KvStore& store) const;
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
