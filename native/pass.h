// One pass of a decoder over a batch.
#pragma once

#include "decoder.h"
#include "stack_pass.h"

namespace foreword {

class Pass : private StackPass {
public:
    Pass(Decoder& decoder, const PassRows& rows, std::vector<AdaptedRows> adapted, float* logits, float* hidden);
    void run();
    // Keys and values of the last layer alone, from the stream before it: [rows, hidden size].
    void keep(const float* states);

private:
    void work(int thread);
    void move_rows();
    void embed();
    void keep_hidden(int64_t index);
    void final_norm(const float* row, float* out) const;
    void logits_of_wanted_rows(int thread);

    Decoder& decoder_;
    float* logits_;
    float* hidden_;
};

}  // namespace foreword
