// One pass over the layers of a stack: the common part of the passes of decoders and draft heads.
#pragma once

#include <algorithm>

#include "stack.h"

namespace foreword {

// The rows of a pass and the memory that they read and write.
struct PassRows {
    const Batch& batch;
    KvStore& store;
    size_t kind;             // index of the layers' kind of KV rows in the store
    const int32_t* starts;   // [requests], first visible KV row; null: all are visible
    // The first `shared_layers` layers use the store's first kind of KV rows, the target's, of which all are visible; the
    // other layers use those of `kind`.
    int64_t shared_layers = 0;
    StateStore* states = nullptr;   // null: no layer is recurrent
    float* shares = nullptr;        // [rows, heads, 2, parts], see AttentionTask; null: not wanted
    int64_t share_parts = 0;
};

// Memory for the input rows of matrix products, in the format that the matrix reads: float32 or quantised.
struct InputBuffer {
    float* f32 = nullptr;
    float* scale = nullptr;
    float* sum = nullptr;
    int8_t* q = nullptr;

    // Allocates memory for `rows` rows of at most `width` values.
    template <typename Allocator>
    void allocate(Allocator& workspace, int64_t rows, int64_t width);

    // Returns `rows` rows from the row `first` on, as `reader` reads them.
    ActivationView view(const PackedMatrix& reader, int64_t first, int64_t rows) const {
        const MatrixView& w = reader.view();
        return {rows, w.cols, w.groups, q + first * w.groups * w.grouping.group_size, scale + first * w.groups, sum + first * w.groups,
                f32 + first * w.cols};
    }
};

// The matrices of a layer that read the same input, as a range of sites. An empty range has no adapters.
struct SiteRange {
    int64_t layer = 0;
    Site first = Site::Input;
    int count = 0;
};

// The new rows of a request within one chunk of a recurrent layer.
struct ChunkSegment {
    int64_t row, rows;        // first row in the batch, number of rows: committed ones, then draft nodes
    int64_t committed_rows;
    int64_t rows_before;      // rows of the chunk in the ring, from earlier passes
    int64_t next_state;       // slot for the state after the segment; -1: it is not stored
};

// What a request reads and writes in every recurrent layer.
struct RequestStates {
    const RequestChunks* chunks;
    int64_t row, rows;        // first row in the batch, number of rows
    int64_t rows_before;      // rows in the ring that is read
    int64_t ring;             // receives the rows of the last segment
    std::vector<ChunkSegment> segments;
};

// The constructor calls `lay_out_*` and `plan_*`. Functions for one row, head or request, or for a range of panels or values,
// are called by one thread for each of these. All others are called by every thread of the pool, in the same order, and
// divide their work with ThreadPool::parallel_for.
class StackPass {
protected:
    struct LinearJob {   // a matrix product whose panels the threads divide among themselves
        const PackedMatrix* matrix;
        LinearOutput target;
    };

    // `widest_input` is the widest input of a matrix product outside the layers.
    StackPass(Stack& stack, const PassRows& rows, int64_t widest_input, std::vector<AdaptedRows> adapted_rows = {});

    // Computes the cosines and sines of a row's rotary embeddings.
    void compute_rope_angles(int64_t row);
    // Sets the input of a layer's input projections from the stream, through the layer's norm.
    void norm_layer_input(int64_t index, int thread);
    // Runs a layer; `norm_layer_input` comes before it.
    void run_layer(int64_t index, int thread);
    // Computes and stores only the keys and values of a layer. The input of its projections is set.
    void store_kv_rows(int64_t index, int thread);
    // Sets the input of `reader`, and of the other matrices of `sites`, from the stream through a norm.
    void norm_rows(const std::vector<float>& weight, const PackedMatrix& reader, const SiteRange& sites, int thread);
    // Does the same for a sublayer, whose input is convolved if `convolution` is not null.
    void set_sublayer_input(const std::vector<float>& norm, const BlockConvolution* convolution, const PackedMatrix& reader,
                            const SiteRange& sites, int thread);
    // Sets the input of `reader`, and of the other matrices of `sites`, from rows of `values`: quantised, or copied if `reader`
    // reads float32.
    void set_input_rows(const float* values, int64_t stride, const PackedMatrix& reader, const SiteRange& sites, int thread);
    // Writes one row of the input of `reader`, in its format. `values` may be the row's own memory in `input.f32`.
    void set_input_row(const PackedMatrix& reader, const float* values, int64_t row, const ActivationView& input) const;
    // Computes several matrix products of one input, with the adapters of `sites`.
    void run_linears(const std::vector<LinearJob>& jobs, const ActivationView& input, int thread, const SiteRange& sites = {});
    // Returns the first rows of the shared input buffer, as `reader` reads them.
    ActivationView linear_input(const PackedMatrix& reader, int64_t rows) const { return input_.view(reader, 0, rows); }
    float* stream(int64_t row) const { return stream_ + row * shape_.hidden_size; }
    float* scratch_of(int thread) const { return thread_scratch_ + thread * scratch_per_thread_; }

    Stack& stack_;
    const Batch& batch_;
    KvStore& store_;
    StateStore* state_store_;
    const StackShape& shape_;
    const KernelTable& kernels_;
    ThreadPool& pool_;
    float* stream_ = nullptr;      // [rows, hidden], the residual stream

private:
    // Divides the stack's workspace into the arrays below, and enlarges it if needed.
    void lay_out_workspace();
    template <typename Allocator>
    void lay_out_mixtures(Allocator& allocator);
    template <typename Allocator>
    void lay_out_latent(Allocator& allocator);
    void plan_attention(const int32_t* starts);
    void plan_states();

    // Mixes positions (attention or a recurrence) and adds the result to the stream. The projections' input is set.
    void mix_positions(int64_t index, int thread);
    // Attention. Norms and rotates keys, and queries if wanted, and stores keys and values in their slots.
    void rotate_and_store_heads(int64_t index, bool with_queries);
    // Moves the gates of gated attention to `attention_gates_`, so that a row's queries are contiguous.
    void split_gates(const Layer& layer, int64_t row);
    void attend(int64_t index, int thread);
    // Multiplies the outputs of gated attention with the sigmoid of the gates.
    void apply_gates(const Layer& layer);

    // Latent attention. Computes `head_outputs_` from the output of the input projections.
    void attend_to_latent_rows(int64_t index, int thread);
    // Computes the queries from the compressed queries.
    void expand_queries(int64_t index, int thread);
    void store_latent_row(const Layer& layer, const KvView& layer_kv, int64_t row);
    // Returns the inputs of a head's matrix, as `reader` reads them.
    ActivationView head_input(const PackedMatrix& reader, int64_t head) const {
        return head_input_.view(reader, head * batch_.rows, batch_.rows);
    }
    // Multiplies the inputs of every head with its matrix. Writes [rows, heads, head stride].
    void multiply_heads(const std::vector<Matrix>& matrices, float* out, int64_t head_stride, int thread);

    // Recurrent layers. Replaces the gates in `projected_` by the input of the output projection.
    void run_recurrence(int64_t index, int thread);
    void convolve_recurrent_row(const Layer& layer, const RequestStates& request, int64_t row) const;
    // Returns an input of the recurrent layer's convolution. `index` counts from the oldest one: first the kernel size - 1
    // inputs stored with the state that is read, then those of the ring's rows, then those of this pass's rows.
    const float* recurrent_input(const Layer& layer, const RequestStates& request, int64_t index) const;
    void store_recurrent_inputs(const Layer& layer, const RequestStates& request) const;
    void run_recurrent_head(const Layer& layer, const RequestStates& request, int64_t head, float* scratch) const;
    // Computes the log decay sums of new rows from that of the row before them, and their betas (Delta) or updates (Mamba-2).
    void compute_decays_and_updates(const Layer& layer, const ChunkSegment& segment, int64_t head, float log_decay_before) const;
    void store_ring_rows(const Layer& layer, const RequestStates& request, int64_t head) const;
    void gate_head_outputs(const Layer& layer, int64_t row) const;

    // MLPs. All of them read the input that is set.
    void run_mlp(const Layer& layer, const SiteRange& gate_and_up, const SiteRange& down, int thread);
    void run_gate_and_up(const Layer& layer, const SiteRange& sites, int thread);
    void activate(const Layer& layer, float* gate, const float* up, int64_t n) const;
    void run_mixture(const Layer& layer, int thread);
    void route(const Layer& layer, int thread);
    void gather_rows(const PackedMatrix& reader, const std::vector<int64_t>& rows);
    // Divides the panels of several matrices among the threads, as if they were one matrix. Calls `piece(matrix, panel begin,
    // panel end)`.
    template <typename Piece>
    void share_panels(int64_t matrices, int64_t panels_each, Piece&& piece) {
        const int64_t panels = matrices * panels_each;
        pool_.parallel_for(panels, std::max<int64_t>(1, panels / (pool_.size() * 8)), [&](int64_t begin, int64_t end) {
            while (begin < end) {
                const int64_t index = begin / panels_each, piece_end = std::min(end, (index + 1) * panels_each);
                piece(index, begin % panels_each, piece_end - index * panels_each);
                begin = piece_end;
            }
        });
    }
    template <typename Piece>
    void share_expert_panels(const std::vector<Matrix>& matrices, const std::vector<int64_t>& starts, Piece&& piece);

    // Adds the product of the input and a matrix to the stream, after the layer's norm, factor or convolution for it, if any.
    void add_to_stream(const Layer& layer, const PackedMatrix& matrix, const std::vector<float>& norm,
                       const BlockConvolution* convolution, const SiteRange& sites, int thread);
    // Computes a row of the convolution of a sublayer's input (side 0) or output (side 1), `values` [rows, hidden].
    void convolve_block_row(const BlockConvolution& convolution, int64_t side, const float* values, int64_t row, float* out) const;

    // Adapters. Computes A x of a row's adapter for each site of a range; the row's input is set.
    void project_low_rank(const PackedMatrix& reader, int64_t row, const SiteRange& sites, int thread);
    // Adds B (A x) of all adapters to some panels of the output of the matrix at sites.first + offset.
    void add_adapters(const SiteRange& sites, int offset, int64_t panel_begin, int64_t panel_end, const LinearOutput& target, int thread);
    // Returns A x of an adapter's rows for the site at this offset, as the factor B reads it.
    ActivationView low_rank_input(const AdaptedRows& rows, const Factor& factor, int offset) const;

    // Index of the first cosine and sine of a row in a rotary embedding.
    int64_t rope_offset(size_t rope_index, int64_t row) const {
        return (static_cast<int64_t>(rope_index) * batch_.rows + row) * (shape_.head_dim / 2);
    }
    KvView kv(int64_t layer) const {
        const int64_t store_layer = stack_.layers_[static_cast<size_t>(layer)].store_layer;
        KvView view = layer < shared_layers_ ? store_.view(0, store_layer) : store_.view(kind_, store_layer - shared_layers_);
        if (stack_.latent()) view.value_dim = stack_.latent()->shape.kv_rank;
        return view;
    }
    uint8_t* byte_scratch_of(int thread) const { return reinterpret_cast<uint8_t*>(scratch_of(thread)); }

    size_t kind_;
    int64_t shared_layers_;
    int64_t widest_input_;   // of all matrix products
    float* shares_;          // as in PassRows
    int64_t share_parts_;

    // Arrays in the workspace.
    float* projected_ = nullptr;        // [rows, projected width], output of the input projections
    float* head_outputs_ = nullptr;     // [rows, attention width] (heads * value dim in latent attention, else query width), or
                                        // [rows, value width] in a recurrent layer
    float* attention_gates_ = nullptr;  // [rows, query width]
    float* expanded_queries_ = nullptr; // [rows, query width], if latent attention compresses queries
    float* latent_queries_ = nullptr;   // [rows, heads, row dim], queries in the space of latent rows
    float* latent_outputs_ = nullptr;   // [rows, heads, kv rank]
    InputBuffer head_input_;            // [heads, rows]
    float* recurrent_convolved_ = nullptr;  // [rows, channels]
    float* updates_ = nullptr;          // [rows, value width]
    float* log_decay_sums_ = nullptr;   // [heads, rows]
    float* betas_ = nullptr;            // [heads, rows]
    float* mlp_gate_ = nullptr;         // [rows, intermediate]
    float* mlp_up_ = nullptr;           // [rows, intermediate]
    float* sublayer_output_ = nullptr;  // [rows, hidden], where it is not added directly
    float* block_input_ = nullptr;      // [rows, hidden], a sublayer's normed input before its convolution
    // [rows, convolution width], the weights computed from each row for the convolutions of the current sublayer
    // (BlockConvolution::projection)
    float* block_weights_ = nullptr;
    float* cos_ = nullptr;              // [ropes, rows, head dim / 2]
    float* sin_ = nullptr;
    InputBuffer input_;                 // [rows], shared by all other products
    float* scores_ = nullptr;           // [rows, experts], logits of the router
    float* expert_weights_ = nullptr;   // [rows, experts per token], factors of the experts' outputs
    float* shared_weight_ = nullptr;    // [rows], factor of the shared experts
    int32_t* chosen_experts_ = nullptr; // [rows, experts per token]
    // Arrays with one row for each pair of a row of the batch and one of its chosen experts, sorted by expert.
    float* expert_gate_ = nullptr;      // [rows * experts per token, expert width]
    float* expert_up_ = nullptr;        // the same
    float* expert_outputs_ = nullptr;   // [rows * experts per token, hidden]
    InputBuffer expert_input_;          // [rows * experts per token]
    float* thread_scratch_ = nullptr;
    int64_t scratch_per_thread_ = 0;    // floats
    int64_t projected_width_ = 0;
    std::vector<AttentionTask> tasks_;
    std::vector<RequestStates> requests_;           // empty without recurrent layers
    std::vector<AdaptedRows> adapted_rows_;
    std::vector<int32_t> adapter_index_of_row_;     // [rows], index into `adapted_rows_`, -1: none; empty without adapters
    float* low_rank_ = nullptr;                     // [sites of one input, rows, max rank], A x; or quantised in the next three
    int8_t* low_rank_q_ = nullptr;
    float* low_rank_scale_ = nullptr;               // [sites of one input, rows]
    float* low_rank_sum_ = nullptr;
};

}  // namespace foreword
