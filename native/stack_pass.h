// What the passes of decoders and of draft heads have in common: their layers.
#pragma once

#include "stack.h"

namespace foreword {

// Where the rows of a pass lie and what they see.
struct PassRows {
    const Batch& batch;
    KvStore& store;
    size_t kind;             // of KV rows
    const int32_t* starts;   // [requests], the first KV row that is seen; null: all are
    // Layers before `lent` have rows of the first kind, of which all are seen, and those behind them have this kind's.
    int64_t lent = 0;
    StateStore* states = nullptr;   // of recurrent layers
};

// The matrices that read one input; what adapters add to them begins when it is there.
struct Readers {
    int64_t layer = 0;
    Site first = Site::Input;
    int count = 0;
};

// New rows of a request within one chunk.
struct ChunkSegment {
    int64_t row, rows;      // in the batch
    int64_t committed;      // of the rows; nodes of a tree follow
    int64_t known;          // rows of the chunk before this pass
    int64_t state;          // that is written after it; -1: none
};

// What a request reads and writes in every recurrent layer.
struct RequestStates {
    const RequestChunks* chunks;
    int64_t row, rows;      // in the batch
    int64_t known;          // rows of the ring that is read
    int64_t ring;           // that the last segment's rows are written to
    std::vector<ChunkSegment> segments;
};

class StackPass {
protected:
    struct Job {   // a linear map whose panels are shared out
        const PackedMatrix* matrix;
        LinearOutput target;
    };

    // `widest` is the widest input of a linear map outside the layers.
    StackPass(Stack& stack, const PassRows& rows, int64_t widest, std::vector<AdaptedRows> adapted = {});

    void turn_row(int64_t row);   // its sines and cosines
    // Norms the stream into the input of a layer's attention.
    void read_stream(int64_t index, int thread);
    // A layer whose attention's input is there.
    void layer(int64_t index, int thread);
    // Keys and values of rows whose input is there; they ask nothing.
    void keep_rows(int64_t index, int thread);
    void norm_rows(const std::vector<float>& weight, const PackedMatrix& reader, const Readers& readers, int thread);
    void quantize_rows(const float* values, int64_t stride, const PackedMatrix& reader, const Readers& readers, int thread);
    void fill_row(const PackedMatrix& reader, const float* values, int64_t row, const ActivationView& into) const;
    void linears(const std::vector<Job>& jobs, const ActivationView& input, int thread, const Readers& readers = {});
    ActivationView activations(const PackedMatrix& reader, int64_t rows) const;
    float* stream(int64_t row) const { return stream_ + row * shape_.hidden_size; }
    float* floats_of(int thread) const { return thread_scratch_ + thread * scratch_each_; }

    Stack& stack_;
    const Batch& batch_;
    KvStore& store_;
    StateStore* state_store_;
    const StackShape& shape_;
    const KernelTable& kernels_;
    ThreadPool& pool_;
    float* stream_ = nullptr;      // [rows, hidden]

private:
    void lay_out();
    template <typename Cut>
    void lay_out_mixtures(Cut& cut);
    void plan_attention(const int32_t* starts);
    void place_heads(int64_t index, bool with_queries);
    // Splits gated queries: gates go to `gates_`, queries stand side by side.
    void take_gates(const Layer& layer, int64_t row);
    void open_gates(const Layer& layer);
    void activate(const Layer& layer, float* gate, const float* up, int64_t n) const;
    void plan_states();
    // Attention or a recurrence, added to the stream; the projections' input is there.
    void mix(int64_t index, int thread);
    // From the projections in `heads_` to what the output projection reads, after the channels there.
    void recur(int64_t index, int thread);
    void convolve_row(const Layer& layer, const RequestStates& request, int64_t row) const;
    // Number `place` of what enters the convolution: a state's newest inputs, then the rows of a ring, then those of the pass.
    const float* entering(const Layer& layer, const RequestStates& request, int64_t place) const;
    void keep_inputs(const Layer& layer, const RequestStates& request) const;
    void recur_head(const Layer& layer, const RequestStates& request, int64_t head, float* scratch) const;
    // Decays of new rows, and their strengths or updates.
    void take_steps(const Layer& layer, const ChunkSegment& segment, int64_t head, float decay) const;
    void keep_segment(const Layer& layer, const RequestStates& request, int64_t head) const;
    void gate_values(const Layer& layer, int64_t row) const;
    void attend(int64_t index, int thread);
    void gate_and_up(const Layer& layer, const Readers& readers, int thread);
    // A x of one row whose input is there, for every adapted matrix that reads it.
    void shrink_row(const PackedMatrix& reader, int64_t row, const Readers& readers, int thread);
    // Adds B (A x) to some panels of the result of matrix `place` of those that read the input.
    void expand(const Readers& readers, int place, int64_t panel_begin, int64_t panel_end, const LinearOutput& target, int thread);
    // A x of all rows of a request, as the outer factor of this place reads it.
    ActivationView shrunk(const AdaptedRows& rows, const Factor& factor, int place) const;
    // Adds what a matrix says of the input that is there to the stream; normed first and scaled, if the layer does so.
    void add_said(const Layer& layer, const PackedMatrix& matrix, const std::vector<float>& norm, const Readers& readers, int thread);
    void dense(const Layer& layer, const Readers& inner, const Readers& down, int thread);
    void mixture(const Layer& layer, int thread);
    void route(const Layer& layer, int thread);
    void gather_rows(const PackedMatrix& reader, const std::vector<int64_t>& rows);
    ActivationView routed(const PackedMatrix& reader, int64_t first, int64_t rows) const;
    template <typename Piece>
    void share_experts(const std::vector<Matrix>& matrices, const std::vector<int64_t>& starts, Piece&& piece);
    int64_t turns_at(size_t rope, int64_t row) const {
        return (static_cast<int64_t>(rope) * batch_.rows + row) * (shape_.head_dim / 2);
    }
    KvView kv(int64_t layer) const {
        const int64_t place = stack_.layers_[static_cast<size_t>(layer)].place;
        return layer < lent_ ? store_.view(0, place) : store_.view(kind_, place - lent_);
    }
    uint8_t* bytes_of(int thread) const { return reinterpret_cast<uint8_t*>(floats_of(thread)); }

    size_t kind_;
    int64_t lent_;
    int64_t widest_;

    // Parts of the workspace.
    float* heads_ = nullptr;       // [rows, heads width], queries, keys and values, or what a recurrent layer projects
    float* attended_ = nullptr;    // [rows, query width], or [rows, values] of a recurrent layer
    float* gates_ = nullptr;       // [rows, query width], of gated attention
    float* convolved_ = nullptr;   // [rows, channels]
    float* updates_ = nullptr;     // [rows, values]
    float* decays_ = nullptr;      // [heads, rows]
    float* strength_ = nullptr;    // [heads, rows]
    float* gate_ = nullptr;        // [rows, intermediate]
    float* up_ = nullptr;          // [rows, intermediate]
    float* added_ = nullptr;       // [rows, hidden], what half a layer says, where it is not added as it is
    float* cos_ = nullptr;         // [ropes, rows, head dim / 2]
    float* sin_ = nullptr;
    float* input_f32_ = nullptr;   // a linear map's input: [rows, widest]
    float* input_scale_ = nullptr;
    float* input_sum_ = nullptr;
    int8_t* input_q_ = nullptr;
    float* scores_ = nullptr;      // [rows, experts]
    float* share_ = nullptr;       // [rows, per token], how much each taken expert counts
    float* shared_ = nullptr;      // [rows], how much the shared ones do
    int32_t* chosen_ = nullptr;    // [rows, per token]
    float* routed_gate_ = nullptr; // [rows * per token, expert size], sorted by expert
    float* routed_up_ = nullptr;
    float* said_ = nullptr;        // [rows * per token, hidden]
    float* routed_f32_ = nullptr;  // a linear map's input, sorted by expert
    float* routed_scale_ = nullptr;
    float* routed_sum_ = nullptr;
    int8_t* routed_q_ = nullptr;
    float* thread_scratch_ = nullptr;
    int64_t scratch_each_ = 0;     // floats per thread
    int64_t heads_width_ = 0;
    std::vector<AttentionTask> tasks_;
    std::vector<RequestStates> requests_;   // with recurrent layers
    std::vector<AdaptedRows> adapted_;
    std::vector<int32_t> adapted_of_row_;   // [rows], place in `adapted_`, or -1; empty without adapters
    float* shrunk_ = nullptr;               // [places, rows, most rank]
    int8_t* shrunk_q_ = nullptr;            // the same, quantised
    float* shrunk_scale_ = nullptr;         // [places, rows]
    float* shrunk_sum_ = nullptr;
};

}  // namespace foreword
