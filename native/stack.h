// Layers of the llama family, and what a pass over them needs between calls: the common part of decoders and draft heads.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "adapter.h"
#include "batch.h"
#include "experts.h"
#include "kv_store.h"
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

// How positions turn heads.
struct Rope {
    std::vector<float> inverse_frequencies;   // one per rotated pair
    float magnitude = 1.0f;                   // turned numbers are multiplied with it
};

// Of an MLP. Only a squared ReLU has no second matrix that it is multiplied with.
enum class Activation { Silu, Gelu, SquaredRelu };

struct Layer {
    std::vector<float> attention_norm;         // empty: the input is read as it is
    // What reads the stream to mix positions: query (with gates, if it has twice the rows), key and value, or the
    // projections of a recurrent layer. Empty: the layer is an MLP alone.
    std::vector<Matrix> inputs;
    Matrix output;
    std::shared_ptr<const Recurrent> recurrent;   // null: attention
    int64_t place = 0;                         // among the layers with attention, or the recurrent ones
    std::vector<float> query_norm, key_norm;   // of each head, or of all together; empty: heads are not normalised
    std::vector<float> mlp_norm;               // empty: the stream is read as it is
    Matrix gate, up, down;                     // null in a mixture without shared experts, and without an MLP; `up` with SquaredRelu
    std::shared_ptr<const Experts> experts;    // null: the MLP alone
    int64_t window = 0;                        // positions that are seen; 0: all
    bool rotated = true;                       // whether positions turn queries and keys
    size_t rope = 0;                           // by which of the stack's
    float softcap = 0.0f;                      // of attention scores; 0: none
    std::vector<float> sinks;                  // of every head, one more score, of no position; empty: none
    Activation activation = Activation::Silu;
    float score_scale = 0.0f;                  // of attention scores; 0: 1 / sqrt(head dim)
    std::vector<float> after_attention, after_mlp;   // norms of what is added to the stream; empty: none
    float residual_scale = 1.0f;               // of what is added

    bool adds_as_it_is() const { return after_attention.empty() && after_mlp.empty() && residual_scale == 1.0f; }

    bool has_attention() const { return !inputs.empty() && !recurrent; }
    // Null: the layer has no such matrix.
    const PackedMatrix* at(Site site) const;
};

// The most that any mixture of a stack needs.
struct MixtureSizes {
    int64_t count = 0, per_token = 0, size = 0;
};

// Threads, and who may use them now: a decoder and its heads take turns.
struct Workers {
    explicit Workers(int threads) : pool(threads) {}
    ThreadPool pool;
    std::mutex one_pass;
};

class Stack {
public:
    Stack(StackShape shape, const KernelTable& kernels, std::shared_ptr<Workers> workers, Rope rope);

    // One more way of turning, for layers that name its number.
    size_t add_rope(Rope rope);
    // Of the layer that was added last.
    void set_sinks(std::vector<float> sinks);

    const StackShape& shape() const { return shape_; }
    const KernelTable& kernels() const { return kernels_; }
    const std::shared_ptr<Workers>& workers() const { return workers_; }
    int threads() const { return workers_->pool.size(); }
    const char* isa() const { return kernels_.name; }

protected:
    friend class StackPass;
    void check_mlp(const Layer& layer) const;
    void check_attention(const Layer& layer, int64_t inputs) const;
    void check_recurrent(const Layer& layer, int64_t inputs) const;
    // States and rings of a batch against the store and the rows.
    void check_states(const Batch& batch, const StateStore* states) const;
    void check_head_norms(const Layer& layer) const;
    // The attention of a layer reads `inputs` numbers; the hidden ones of a norm that it has, unless it has none.
    void add_layer(Layer layer, int64_t inputs);
    // The arrays of a batch against the pages, the matrices and each other; `starts` may be null.
    void check_rows(const Batch& batch, const KvStore& store, int64_t vocab_size, const int32_t* starts) const;
    RowKind kv_rows() const;
    int64_t attention_layers() const;
    const Recurrent* recurrent() const;   // of the recurrent layers; null: there are none
    int64_t layer_bytes() const;

    StackShape shape_;
    const KernelTable& kernels_;
    std::shared_ptr<Workers> workers_;
    std::vector<Rope> ropes_;
    std::vector<Layer> layers_;
    MixtureSizes mixtures_;
    bool adds_as_it_is_ = true;      // every layer
    std::vector<float> workspace_;   // kept between passes; grows to the largest batch
};

// Whether one quantised input serves both.
bool same_input(const PackedMatrix& a, const PackedMatrix& b);
void require(bool holds, const char* message);
void require_matrix(const Matrix& matrix, int64_t rows, int64_t cols, const char* message);
void require_norm(const std::vector<float>& norm, int64_t size, bool may_be_missing, const char* message);
void require_below(const int32_t* values, int64_t count, int64_t bound, const char* message);

}  // namespace foreword
