// One pass of a decoder over a batch.
#pragma once

#include "decoder.h"
#include "stack_pass.h"

namespace foreword {

class Pass : private StackPass {
public:
    // `logits` and `hidden` are the outputs of Decoder::forward.
    Pass(Decoder& decoder, const PassRows& rows, std::vector<AdaptedRows> adapted_rows, float* logits, float* hidden);
    void run();
    // Computes and stores only the keys and values of the last layer, from its input [rows, hidden size].
    void store_last_layer_kv(const float* states);

private:
    void work(int thread);
    // Executes the batch's copies of KV rows and ring rows.
    void copy_rows();
    void embed();
    // Writes the hidden states of the taps before layer `index`.
    void store_hidden(int64_t index);
    void final_norm(const float* row, float* out) const;
    void compute_logits(int thread);

    Decoder& decoder_;
    float* logits_;
    float* hidden_;
};

}  // namespace foreword
