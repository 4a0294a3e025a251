// One pass of a decoder over a batch.
#pragma once

#include "decoder.h"

namespace foreword {

class Pass {
public:
    Pass(Decoder& decoder, const Batch& batch, KvStore& store, float* logits, float* hidden);
    void run();

private:
    struct Job {   // a linear map whose panels are shared out
        const PackedMatrix* matrix;
        LinearOutput target;
    };

    void lay_out();
    void plan_attention();
    void work(int thread);
    void move_kv_rows();
    void embed();
    void layer(int64_t index, int thread);
    void norm_rows(const float* weight, const PackedMatrix& reader, int thread);
    void quantize_rows(const float* values, int64_t width, const PackedMatrix& reader, const ActivationView& into);
    void place_heads(int64_t index);
    void attend(int64_t index, int thread);
    KvView kv(int64_t layer) const { return store_.view(0, layer); }
    void linears(const std::vector<Job>& jobs, const ActivationView& input, int thread);
    void gate_and_up(const Layer& layer, int thread);
    void keep_hidden(int64_t index);
    void final_norm(const float* row, float* out) const;
    void logits_of_wanted_rows(int thread);
    ActivationView activations(const PackedMatrix& reader, int64_t rows) const;
    uint8_t* bytes_of(int thread) const { return reinterpret_cast<uint8_t*>(thread_scratch_ + thread * scratch_each_); }
    float* floats_of(int thread) const { return thread_scratch_ + thread * scratch_each_; }

    Decoder& decoder_;
    const Batch& batch_;
    KvStore& store_;
    const DecoderShape& shape_;
    const KernelTable& kernels_;
    ThreadPool& pool_;
    float* logits_;
    float* hidden_;

    // Parts of the workspace.
    float* stream_ = nullptr;      // [rows, hidden]
    float* heads_ = nullptr;       // [rows, query width + 2 * kv width]
    float* attended_ = nullptr;    // [rows, query width]
    float* gate_ = nullptr;        // [rows, intermediate]
    float* up_ = nullptr;          // [rows, intermediate]
    float* cos_ = nullptr;         // [rows, head dim / 2]
    float* sin_ = nullptr;
    float* input_f32_ = nullptr;   // a linear map's input: [rows, widest]
    float* input_scale_ = nullptr;
    float* input_sum_ = nullptr;
    int8_t* input_q_ = nullptr;
    float* thread_scratch_ = nullptr;
    int64_t scratch_each_ = 0;     // floats per thread
    int64_t heads_width_ = 0;
    std::vector<AttentionTask> tasks_;
};

}  // namespace foreword
