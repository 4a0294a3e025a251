// A decoder of the llama family: packed weights, and what a pass needs between calls.
#pragma once

#include "stack.h"

namespace foreword {

class Decoder : public Stack {
public:
    Decoder(int64_t vocab_size, StackShape shape, const KernelTable& kernels, int threads,
            std::vector<float> inverse_frequencies);

    void add_layer(Layer layer);
    void set_ends(Matrix embedding, Matrix head, std::vector<float> final_norm);

    // logits [wanted, vocab]; hidden [taps, hidden wanted, hidden size]. The store's first kind of rows is this decoder's.
    void forward(const Batch& batch, KvStore& store, float* logits, float* hidden);

    int64_t vocab_size() const { return vocab_size_; }
    int64_t weight_bytes() const;

private:
    friend class Pass;
    void check(const Batch& batch, const KvStore& store) const;

    int64_t vocab_size_;
    Matrix embedding_, head_;
    std::vector<float> final_norm_;
};

}  // namespace foreword
