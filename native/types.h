// Plain values that cross between the driver of a pass and the kernels of one instruction set.
#pragma once

#include <cstdint>

namespace foreword {

constexpr int64_t kPanelRows = 8;   // output rows that are interleaved, so that one vector holds one column of each
constexpr int64_t kGroup = 32;      // columns that share a scale, in weights and in activations
constexpr int64_t kPageSize = 16;   // KV rows per page
constexpr int64_t kKeyTile = 32;    // keys per softmax tile; tiles are fixed by position

// How a weight matrix is stored. The quantised forms keep the numbers of GGUF's blocks of the same name.
enum class Form : int32_t { F32, Q8_0, Q4_0, Q4_1 };

// A packed weight matrix: panels of eight output rows, each one contiguous stream.
//   F32:        per column, 8 floats
//   Q8_0, Q4_0: per group, 8 half scales, then 8 (4) vectors of 32 bytes = 8 rows x 4 columns
//   Q4_1:       per group, 8 half scales, 8 half minima, then 4 vectors
// A 4-bit vector j holds columns 4j..4j+3 in its low and 16+4j..16+4j+3 in its high nibbles.
struct MatrixView {
    Form form;
    int64_t rows;
    int64_t cols;
    int64_t groups;       // of 32 columns, the last one filled up with zeros
    int64_t panel_bytes;
    const uint8_t* data;
};

// Rows of activations, quantised in groups of 32 (`q`, `scale`, `sum`) or plain (`f32`).
struct ActivationView {
    int64_t rows;
    int64_t cols;
    int64_t groups;
    int8_t* q;      // [rows, groups * 32]
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

// The KV memory of one layer. Keys stand transposed inside a page, so that a tile of keys is read as vectors.
struct KvView {
    void* keys;        // [pages, kv heads, padded head dim, 16]
    void* values;      // [pages, kv heads, 16, padded head dim]
    bool half;         // elements are IEEE half, else float
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
    float scale;                  // 1 / sqrt(head dim)
    float* scratch;               // attention_scratch() floats
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
    // One row of n floats into groups; fills the last group up with zeros.
    void (*quantize)(const float* x, int64_t n, int8_t* q, float* scale, float* sum);
    // silu(gate) * up, in place in gate.
    void (*silu_mul)(float* gate, const float* up, int64_t n);
    // Half-split rotation of one head by cos/sin [head dim / 2].
    void (*rotate)(float* head, const float* cos, const float* sin, int64_t head_dim);
    // One KV row of one head into its slot.
    void (*store_kv)(const KvView&, int64_t slot, int64_t kv_head, const float* key, const float* value);
    void (*attention)(const KvView&, const AttentionTask&);
};

// Floats of scratch that an attention task needs.
inline int64_t attention_scratch(int64_t padded_dim, int64_t rows, int64_t heads) {
    return 2 * kKeyTile * padded_dim + rows * heads * (2 * padded_dim + 8) + kKeyTile;
}

// Bytes of scratch that `linear` needs for a matrix.
inline int64_t linear_scratch(int64_t groups) { return groups * (kPanelRows * kGroup + 64); }

}  // namespace foreword
