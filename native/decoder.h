// A decoder of the llama family: packed weights, and what a pass needs between calls.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "batch.h"
#include "kv_store.h"
#include "packed_matrix.h"
#include "thread_pool.h"
#include "types.h"

namespace foreword {

struct DecoderShape {
    int64_t vocab_size;
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    float rms_norm_eps;

    int64_t query_width() const { return num_heads * head_dim; }
    int64_t kv_width() const { return num_kv_heads * head_dim; }
};

using Matrix = std::shared_ptr<PackedMatrix>;

struct Layer {
    std::vector<float> attention_norm;
    Matrix query, key, value, output;
    std::vector<float> query_norm, key_norm;   // empty: heads are not normalised
    std::vector<float> mlp_norm;
    Matrix gate, up, down;
};

class Decoder {
public:
    Decoder(DecoderShape shape, const KernelTable& kernels, int threads, std::vector<float> inverse_frequencies);

    void add_layer(Layer layer);
    void set_ends(Matrix embedding, Matrix head, std::vector<float> final_norm);

    // logits [wanted, vocab]; hidden [taps, hidden wanted, hidden size]. The store's first kind of rows is this decoder's.
    void forward(const Batch& batch, KvStore& store, float* logits, float* hidden);

    const DecoderShape& shape() const { return shape_; }
    int threads() const { return pool_.size(); }
    const char* isa() const { return kernels_.name; }
    int64_t weight_bytes() const;

private:
    friend class Pass;
    void check(const Batch& batch, const KvStore& store) const;
    void check_layer(const Layer& layer) const;
    RowKind kv_rows() const;

    DecoderShape shape_;
    const KernelTable& kernels_;
    ThreadPool pool_;
    std::vector<float> inverse_frequencies_;
    std::vector<Layer> layers_;
    Matrix embedding_, head_;
    std::vector<float> final_norm_;
    std::vector<float> workspace_;   // kept between passes; grows to the largest batch
    std::mutex one_pass_;
};

}  // namespace foreword
