// Plain values that cross between the driver of a pass and the kernels of one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace foreword {

constexpr int64_t kPanelRows = 8;   // output rows that are interleaved, so that one vector holds one column of each
constexpr int64_t kBlock = 32;      // columns of one GGUF block, and of one step of the integer loop
constexpr int64_t kRotation = 64;   // columns that a rotation mixes
constexpr int64_t kMaxGroup = 192;  // columns that share a scale at most: their integer sums stay below 2^22
constexpr int64_t kTokenBlock = 64;   // tokens per walk over the weights: their activations stay in the cache
constexpr int64_t kPageSize = 16;   // KV rows per page
constexpr int64_t kKeyTile = 32;    // keys per softmax tile; tiles are fixed by position
constexpr int64_t kQueryTile = 4;   // queries that meet a tile together: their sums stay in registers
constexpr int64_t kAttentionRows = 16;   // rows of a request that share the tiles they read, at most
constexpr int64_t kStateChunk = 64;      // positions between two states of recurrent layers, as in kv/chunks.py
constexpr int64_t kRingRows = 128;       // rows of a ring: a chunk's, and those of a tree's nodes after it

// How the numbers of a weight matrix are stored: w, scale * q, or scale * q + minimum. All but F32 and Factor are
// GGUF's blocks (Q8 is Q8_0, and what is rounded to 8 bits at load) but Q4_Z: scale * (q - zero), as GPTQ and AWQ have it.
enum class Form : int32_t { F32, Q8, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Q4_Z, Factor };

constexpr int64_t kSuperGroups = 8;     // groups of 32 columns in a K form's block of 256
constexpr int64_t kSuperHeader = 160;   // bytes before their weights: 8 half scales, 8 half minima, 16 bytes per group

// How a panel of eight rows stores 32 columns of a block form.
struct BlockLayout {
    int bits;         // of a level: 8, or a nibble and the bits above it
    int bias;         // what is subtracted from an unsigned level
    int scales;       // per 32 columns: Q6_K has one for each 16
    bool has_min;
    bool is_super;    // scales are a block's scale times 8 bits per group, minima likewise
    int64_t header;   // bytes before the weights of a group, unless is_super: 8 half scales, and 8 half minima or 8 zeros
    int64_t bytes;    // of weights
    bool has_zeros = false;   // the minimum is the scale times a signed byte in the header
    constexpr bool is_unsigned() const { return bits < 8 && bias == 0; }
};

constexpr BlockLayout block_layout(Form form) {
    switch (form) {
        case Form::Q4_0: return {4, 8, 1, false, false, 16, 128};
        case Form::Q4_1: return {4, 0, 1, true, false, 32, 128};
        case Form::Q5_0: return {5, 16, 1, false, false, 16, 160};
        case Form::Q5_1: return {5, 0, 1, true, false, 32, 160};
        case Form::Q4_K: return {4, 0, 1, true, true, 0, 128};
        case Form::Q5_K: return {5, 0, 1, true, true, 0, 160};
        case Form::Q6_K: return {6, 32, 2, false, true, 0, 192};
        case Form::Q4_Z: return {4, 0, 1, true, false, 24, 128, true};
        default: return {8, 0, 1, false, false, 16, 256};
    }
}

// How columns are grouped under one scale, in a matrix and in the activations that it meets.
struct Grouping {
    int64_t group;    // columns per scale, a multiple of 32; the 4-bit forms have 32
    bool rotated;     // blocks of 64 columns are turned by a Hadamard matrix, on both sides
};

// A packed weight matrix: panels of eight output rows, each one contiguous stream.
//   F32:       per column, 8 floats
//   Factor:    8 float scales, then vectors of 32 bytes = 8 rows x 4 columns, filled up to a multiple of 16 columns
//   Q8:        per group, 8 half scales, then vectors of 32 bytes = 8 rows x 4 columns
//   others:    per group a header (BlockLayout), then 4 vectors of nibbles, of which j holds columns 4j..4j+3 in its low
//              and 16+4j..16+4j+3 in its high ones, then the bits above: of 5 bits, one vector that holds those of
//              columns 4k..4k+3 in bit k; of 6 bits, two, for columns 0..15 and 16..31, two bits each
//   K forms:   per 8 groups, the headers together (kSuperHeader), then the weights
struct MatrixView {
    Form form;
    int64_t rows;
    int64_t cols;
    Grouping grouping;
    int64_t groups;       // the last one filled up with zeros
    int64_t panel_bytes;
    const uint8_t* data;
};

// Rows of activations, quantised in groups (`q`, `scale`, `sum`) or plain (`f32`).
struct ActivationView {
    int64_t rows;
    int64_t cols;
    int64_t groups;
    int8_t* q;      // [rows, groups * group]
    float* scale;   // [rows, groups]
    float* sum;     // [rows, groups], scale * sum of q: what a minimum of the weights is multiplied with
    float* f32;     // [rows, cols]
};

// Where a linear map leaves its results: out[row * stride + column].
struct LinearOutput {
    float* out;
    int64_t stride;
    const float* bias;  // [matrix rows] or null
    bool accumulate;    // add to what is there (residual stream)
};

// How a number of a KV row is stored; sums over them are float32.
enum class KvNumber : int32_t { Float32, BFloat16 };
constexpr int64_t kv_number_bytes(KvNumber number) { return number == KvNumber::Float32 ? 4 : 2; }

// The KV memory of one layer. Keys stand transposed inside a page, so that a tile of keys is read as vectors.
struct KvView {
    KvNumber number;
    uint8_t* keys;       // [pages, kv heads, padded head dim, 16]
    uint8_t* values;     // [pages, kv heads, 16, padded head dim]
    int64_t kv_heads;
    int64_t head_dim;
    int64_t padded_dim;  // head dim rounded up to 8
};

// Attention of some rows of one request in one KV head.
struct AttentionTask {
    const int32_t* block_table;   // physical pages of the request in logical order
    const int32_t* prefix_lens;   // [rows]
    const int64_t* masks;         // [rows]
    const float* queries;         // [rows, query stride], rotated; head h at h * head dim
    float* out;                   // [rows, out stride]
    int64_t query_stride;
    int64_t out_stride;
    int64_t row_begin;
    int64_t row_end;
    int64_t kv_head;
    int64_t head_begin;           // query heads, all of this KV head's group
    int64_t head_end;
    int64_t first;                // logical rows before this one are not seen
    int64_t window;               // a row sees so many of its newest positions; 0: all
    float scale;                  // 1 / sqrt(head dim), unless the layer has another
    float softcap;                // scores are squashed between this and minus this; 0: they are not
    const float* sinks;           // [heads], one more score of a head, of no position; null: there is none
    float* scratch;               // attention_scratch() floats
};

// Rows of one head of a recurrent layer within a chunk, in order of position; numbers of a row are neighbours.
struct ChunkRows {
    const float* keys;       // [rows, key stride]
    const float* updates;    // [rows, update stride], what each row adds to the state
    const float* decays;     // [rows], sums of the log decays since the chunk began
    int64_t key_stride, update_stride;
    int64_t count;
};

// New rows of one request in one chunk and one head of a recurrent layer. Every row reads the state, the rows before the
// pass and its ancestors among the new rows.
struct RecurrentTask {
    int64_t key_dim;
    int64_t value_dim;             // a multiple of 8
    bool is_delta;                 // updates are made here, else they are there
    const float* state;            // [key dim, value dim], before the chunk
    ChunkRows known;               // committed before this pass
    int64_t rows;
    int64_t committed;             // of the rows; nodes of a tree follow
    const int64_t* masks;          // [nodes], a node's ancestors among the nodes, itself included
    const float* queries;          // [rows, stride]
    const float* keys;             // [rows, stride]
    const float* values;           // [rows, stride]
    int64_t stride;
    const float* decays;           // [rows]
    const float* strength;         // [rows], share of the difference that an update makes up for (delta rule)
    float* updates;                // [rows, out stride]
    float* out;                    // [rows, out stride], what queries find
    int64_t out_stride;
};

// The kernels of one instruction set.
struct KernelTable {
    const char* name;
    // y = x W^T for the panels [panel_begin, panel_end); output column 0 is the first row of `panel_begin`.
    void (*linear)(const MatrixView&, const ActivationView&, int64_t panel_begin, int64_t panel_end,
                   const LinearOutput&, uint8_t* scratch);
    // Row `row` of a packed matrix as floats.
    void (*dequantize_row)(const MatrixView&, int64_t row, float* out);
    // x * weight / rms(x), to out [n].
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
    // One row of n floats into groups; the last group is filled up with zeros.
    void (*quantize)(const float* x, int64_t n, const Grouping&, int8_t* q, float* scale, float* sum);
    // Turns blocks of 64 floats in place; doing it twice gives back what was there.
    void (*turn)(float* x, int64_t blocks);
    // silu(gate) * up, in place in gate.
    void (*silu_mul)(float* gate, const float* up, int64_t n);
    // gelu(gate) * up, with tanh.
    void (*gelu_mul)(float* gate, const float* up, int64_t n);
    // gate = (up + 1) * gate / (1 + e^(-slope * gate)), of a gate that is at most `limit` and of up between it and minus it.
    void (*clamped_mul)(float* gate, const float* up, float limit, float slope, int64_t n);
    // cap * tanh(x / cap), in place.
    void (*squash)(float* x, float cap, int64_t n);
    // Half-split rotation of one head by cos/sin [head dim / 2].
    void (*rotate)(float* head, const float* cos, const float* sin, int64_t head_dim);
    // One KV row of one head into its slot.
    void (*store_kv)(const KvView&, int64_t slot, int64_t kv_head, const float* key, const float* value);
    void (*attention)(const KvView&, const AttentionTask&);
    // x * sigmoid(gate), in place in x.
    void (*sigmoid_mul)(float* x, const float* gate, int64_t n);
    // The square of what is above 0, in place.
    void (*squared_relu)(float* x, int64_t n);
    // sum of inputs[j] * weights[j] over the kernel's positions, plus the bias unless it is null; then SiLU, if wanted.
    void (*convolve)(const float* const* inputs, const float* weights, const float* bias, int64_t kernel, bool with_silu, int64_t n,
                     float* out);
    void (*recur)(const RecurrentTask&);
    // The state after the rows of a chunk; `into` may be the state itself. `scratch` has room for kStateChunk * key dim.
    void (*fold)(const float* state, const ChunkRows* parts, int64_t count, int64_t key_dim, int64_t value_dim, float* into,
                 float* scratch);
};

// Floats of scratch that an attention task needs.
inline int64_t attention_scratch(int64_t padded_dim, int64_t rows, int64_t heads) {
    return 2 * kKeyTile * padded_dim + kQueryTile * kKeyTile + rows * heads * (2 * padded_dim + 8);
}

// Bytes before the weights of a panel of a factor, and the columns that it has room for.
constexpr int64_t kFactorHeader = 32;
constexpr int64_t factor_columns_of(int64_t cols) { return (cols + 15) / 16 * 16; }

// Bytes of scratch that `linear` needs for a matrix of so many columns: two panels spread to bytes with their scales
// and minima, and two numbers per group of a block of tokens.
inline int64_t linear_scratch(int64_t cols) {
    const int64_t blocks = (cols + kMaxGroup - 1) / kMaxGroup * (kMaxGroup / kBlock);
    return blocks * (2 * kPanelRows * kBlock + 128 + 2 * 4 * kTokenBlock) + 64;
}

// Bytes behind a weight stream that prefetches may name.
constexpr int64_t kStreamSlack = 4096;

}  // namespace foreword
