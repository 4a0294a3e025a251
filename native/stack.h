// The layers of a decoder or a draft head of the llama family: their weights, threads and workspace.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "adapter.h"
#include "batch.h"
#include "block_convolution.h"
#include "experts.h"
#include "kv_store.h"
#include "latent.h"
#include "packed_matrix.h"
#include "recurrent.h"
#include "state_store.h"
#include "thread_pool.h"
#include "types.h"

namespace foreword {

struct StackShape {
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    float rms_norm_eps;

    int64_t query_width() const { return num_heads * head_dim; }
    int64_t kv_width() const { return num_kv_heads * head_dim; }
};

// A rotary embedding.
struct Rope {
    std::vector<float> inverse_frequencies;   // one per rotated pair of dimensions
    float magnitude = 1.0f;                   // factor of the sines and cosines
};

// Activation of an MLP: silu(gate) * up, gelu(gate) * up, or the square of relu(gate), which has no up projection.
enum class Activation { Silu, Gelu, SquaredRelu };

struct Layer {
    std::vector<float> attention_norm;         // empty: the input is not normed
    // Query, key and value projections of attention, those of latent attention (Latent), or the projections of a recurrent
    // layer; empty in a layer that is only an MLP. The query projection of gated attention has twice as many rows: query and
    // gate of each head.
    std::vector<Matrix> input_projections;
    Matrix output_projection;
    std::shared_ptr<const Recurrent> recurrent;   // null: attention
    std::shared_ptr<const Latent> latent;      // of latent attention; null: keys and values of each head are stored
    int64_t store_layer = 0;                   // index of the layer in the KV store (attention) or the state store (recurrent)
    std::vector<float> query_norm, key_norm;   // [head dim], or of all heads together; empty: heads are not normed
    std::vector<float> mlp_norm;               // empty: the input is not normed
    // Null in a mixture without shared experts and in a layer without an MLP; `up` is null with SquaredRelu.
    Matrix gate, up, down;
    std::shared_ptr<const Experts> experts;    // null: no mixture
    int64_t window = 0;                        // of sliding-window attention, in positions; 0: all are visible
    bool has_rope = true;                      // queries and keys are rotated
    size_t rope_index = 0;                     // into the stack's rotary embeddings
    float softcap = 0.0f;                      // of attention scores; 0: none
    std::vector<float> sinks;                  // per query head, a score without a position; empty: none
    Activation activation = Activation::Silu;
    float score_scale = 0.0f;                  // factor of attention scores; 0: 1 / sqrt(head dim)
    std::vector<float> post_attention_norm, post_mlp_norm;   // norms of the sublayers' outputs; empty: none
    float residual_scale = 1.0f;               // factor of the sublayers' outputs
    std::shared_ptr<const BlockConvolution> attention_convolution, mlp_convolution;   // both or none

    // Whether the sublayers' outputs are added to the stream without a norm, a factor or a convolution.
    bool adds_directly() const {
        return post_attention_norm.empty() && post_mlp_norm.empty() && residual_scale == 1.0f && !attention_convolution;
    }

    bool has_attention() const { return !input_projections.empty() && !recurrent; }
    // Returns null if the layer has no such matrix.
    const PackedMatrix* matrix_at(Site site) const;
};

// The largest sizes among the mixtures of a stack.
struct MixtureSizes {
    int64_t experts = 0, experts_per_token = 0, expert_width = 0;
};

// The threads that a decoder and its heads share. `pass_mutex` is held during a pass: only one runs at a time.
struct Workers {
    explicit Workers(int threads) : pool(threads) {}
    ThreadPool pool;
    std::mutex pass_mutex;
};

class Stack {
public:
    Stack(StackShape shape, const KernelTable& kernels, std::shared_ptr<Workers> workers, Rope rope);

    // Adds another rotary embedding; returns its index, for Layer::rope_index.
    size_t add_rope(Rope rope);
    // Sets the sinks of the layer that was added last.
    void set_sinks(std::vector<float> sinks);
    // Sets the convolutions around attention and MLP of the layer that was added last.
    void set_convolutions(std::shared_ptr<const BlockConvolution> attention, std::shared_ptr<const BlockConvolution> mlp);

    const StackShape& shape() const { return shape_; }
    const KernelTable& kernels() const { return kernels_; }
    const std::shared_ptr<Workers>& workers() const { return workers_; }
    int threads() const { return workers_->pool.size(); }
    const char* isa() const { return kernels_.name; }

protected:
    friend class StackPass;
    // All checks throw std::invalid_argument.
    void check_mlp(const Layer& layer) const;
    void check_attention(const Layer& layer, int64_t input_width) const;
    void check_latent(const Layer& layer, int64_t input_width) const;
    void check_recurrent(const Layer& layer, int64_t input_width) const;
    void check_head_norms(const Layer& layer) const;
    // Checks the arrays of a batch against the pages, the vocabulary and each other. `starts` [requests] has the first
    // visible KV rows; null: all are visible.
    void check_rows(const Batch& batch, const KvStore& store, int64_t vocab_size, const int32_t* starts) const;
    // Checks the states and rings of a batch against the state store and the batch's rows.
    void check_recurrent_states(const Batch& batch, const StateStore* states) const;
    // Checks and appends a layer. `input_width` is the width of its input projections' input.
    void add_layer(Layer layer, int64_t input_width);
    RowKind kv_row_kind() const;
    int64_t attention_layers() const;
    const Recurrent* first_recurrent() const;   // null: no layer is recurrent
    // Latent attention of the first layer that has it, whose shape all layers with attention have; null: none.
    const Latent* latent() const;
    int64_t attention_width() const;            // of the input of attention's output projection
    int64_t layer_bytes() const;

    StackShape shape_;
    const KernelTable& kernels_;
    std::shared_ptr<Workers> workers_;
    std::vector<Rope> ropes_;
    std::vector<Layer> layers_;
    MixtureSizes mixtures_;
    bool adds_directly_ = true;      // whether Layer::adds_directly holds for every layer
    // Number of convolution weights that are computed from each row (BlockConvolution::projection); 0: no layer has convolutions.
    int64_t convolution_width_ = 0;
    std::vector<float> workspace_;   // kept between passes; grows to the largest batch
};

// Whether both matrices can read the same quantised input.
bool share_input_format(const PackedMatrix& a, const PackedMatrix& b);
// Throw std::invalid_argument with the message unless the condition holds.
void require(bool holds, const char* message);
void require_matrix(const Matrix& matrix, int64_t rows, int64_t cols, const char* message);
void require_norm(const std::vector<float>& norm, int64_t size, bool may_be_missing, const char* message);
// Requires 0 <= value < bound for all values.
void require_indices(const int32_t* values, int64_t count, int64_t bound, const char* message);

}  // namespace foreword
