// One pass of a decoder over a batch.
#pragma once

#include "decoder.h"
#include "stack_pass.h"

namespace foreword {

class Pass : private StackPass {
public:
    Pass(Decoder& decoder, const Batch& batch, KvStore& store, std::vector<AdaptedRows> adapted, float* logits, float* hidden);
    void run();

private:
    void work(int thread);
    void move_kv_rows();
    void embed();
    void keep_hidden(int64_t index);
    void final_norm(const float* row, float* out) const;
    void logits_of_wanted_rows(int thread);

    Decoder& decoder_;
    float* logits_;
    float* hidden_;
};

}  // namespace foreword
