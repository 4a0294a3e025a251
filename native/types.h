// Plain structures shared by the code that runs a pass and the kernels of each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace foreword {

constexpr int64_t kPanelRows = 8;   // interleaved output rows of a panel: one vector holds one column of each
constexpr int64_t kBlock = 32;      // columns of a small GGUF block; the integer loops advance by this many
constexpr int64_t kRotation = 64;   // columns that one Hadamard rotation mixes
constexpr int64_t kMaxGroup = 192;  // most columns per scale: their integer sums stay below 2^22
constexpr int64_t kTokenBlock = 64;   // tokens per pass over the weights: their activations stay in the cache
constexpr int64_t kPageSize = 16;   // KV rows per page
constexpr int64_t kSharePart = 128;   // positions per part of AttentionTask::shares; a multiple of kKeyTile
constexpr int64_t kKeyTile = 32;    // positions per softmax tile; tiles begin at multiples of it
constexpr int64_t kQueryTile = 4;   // queries that are scored together against a tile: their sums stay in registers
constexpr int64_t kAttentionRows = 16;   // most rows of a request in one attention task, which reads each tile once
constexpr int64_t kAttentionHeads = 16;  // most heads in one attention task: their sums stay in the cache
constexpr int64_t kStateChunk = 64;      // positions between two states of recurrent layers, as in kv/chunks.py
constexpr int64_t kRingRows = 128;       // rows of a ring: one chunk, and the nodes of a tree after it

// How the weights w of a matrix are stored. A level q is the stored integer of one weight.
//   F32:              w
//   Q8:               scale * q; GGUF's Q8_0, and matrices that are rounded to 8 bits at load
//   Q4_Z:             scale * (q - zero), from GPTQ and AWQ files
//   Factor:           scale * q with one scale per row: the outer factor of an adapter
//   the other ones:   scale * q or scale * q + minimum, GGUF's blocks of the same name
enum class WeightFormat : int32_t { F32, Q8, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Q4_Z, Factor };

constexpr int64_t kSuperGroups = 8;     // groups of 32 columns in a block of 256 columns (Q4_K, Q5_K, Q6_K)
constexpr int64_t kSuperHeader = 160;   // bytes of such a block's header: 8 half scales, 8 half minima, 16 bytes per group

// How a panel of eight rows stores 32 columns of a block format.
struct BlockLayout {
    int bits;         // per level; more than 4 are stored as a nibble and the upper bits
    int bias;         // subtracted from a stored level
    int scales;       // per row and 32 columns: Q6_K has one for each 16 columns
    bool has_min;
    bool is_super;    // blocks of 256 columns: scale and minimum of a group are those of its block, times factors of 8 bits
    int64_t header;   // bytes before the levels of a group, 0 if is_super: 8 half scales, then 8 half minima or 8 zero points
    int64_t bytes;    // of the levels of 8 rows x 32 columns
    bool has_zeros = false;   // instead of minima, the header has a signed byte per row; the minimum is scale * byte
    constexpr bool is_unsigned() const { return bits < 8 && bias == 0; }
};

constexpr BlockLayout block_layout(WeightFormat format) {
    switch (format) {
        case WeightFormat::Q4_0: return {4, 8, 1, false, false, 16, 128};
        case WeightFormat::Q4_1: return {4, 0, 1, true, false, 32, 128};
        case WeightFormat::Q5_0: return {5, 16, 1, false, false, 16, 160};
        case WeightFormat::Q5_1: return {5, 0, 1, true, false, 32, 160};
        case WeightFormat::Q4_K: return {4, 0, 1, true, true, 0, 128};
        case WeightFormat::Q5_K: return {5, 0, 1, true, true, 0, 160};
        case WeightFormat::Q6_K: return {6, 32, 2, false, true, 0, 192};
        case WeightFormat::Q4_Z: return {4, 0, 1, true, false, 24, 128, true};
        default: return {8, 0, 1, false, false, 16, 256};
    }
}

// Which columns share a scale, in a matrix and in the activations that are multiplied with it.
struct Grouping {
    int64_t group_size;   // columns per scale, a multiple of 32; 32 in every block format but Q8, 1 in F32
    bool is_rotated;      // blocks of 64 columns are multiplied with a Hadamard matrix, in the matrix and in the activations
};

// A packed weight matrix: panels of eight output rows, each one contiguous stream of bytes.
//   F32:       per column, 8 floats
//   Factor:    8 float scales, then vectors of 32 bytes = 8 rows x 4 columns, padded to a multiple of 16 columns
//   Q8:        per group, 8 half scales, then vectors of 32 bytes = 8 rows x 4 columns
//   4 to 6 bits: per group a header (BlockLayout), then 4 vectors of nibbles. The low nibbles of vector j have columns
//              4j..4j+3, the high ones 16+4j..16+4j+3. Then the upper bits: with 5 bits one vector, whose bit k has those
//              of columns 4k..4k+3; with 6 bits two vectors, for columns 0..15 and 16..31, two bits each
//   is_super:  per 8 groups, their headers together (kSuperHeader), then their vectors
struct MatrixView {
    WeightFormat format;
    int64_t rows;
    int64_t cols;
    Grouping grouping;
    int64_t groups;       // per row; the last one is padded with zeros
    int64_t panel_bytes;
    const uint8_t* data;
};

// Rows of activations, either quantised in groups (`q`, `scale`, `sum`) or float32 (`f32`).
struct ActivationView {
    int64_t rows;
    int64_t cols;
    int64_t groups;
    int8_t* q;      // [rows, groups * group size]
    float* scale;   // [rows, groups]
    float* sum;     // [rows, groups], scale * sum of q: the factor of the weights' minimum
    float* f32;     // [rows, cols]
};

// Where a linear map writes its results: out[row * stride + column].
struct LinearOutput {
    float* out;
    int64_t stride;
    const float* bias;  // [matrix rows] or null
    bool accumulate;    // add the results to `out` instead of overwriting it
};

// Number type of KV rows; sums over them are float32. A row of a head in Int8 has a float32 scale.
enum class KvDtype : int32_t { Float32, BFloat16, Int8 };
constexpr int64_t kv_dtype_bytes(KvDtype dtype) { return dtype == KvDtype::Float32 ? 4 : dtype == KvDtype::BFloat16 ? 2 : 1; }
constexpr int64_t kv_scale_bytes(KvDtype dtype) { return dtype == KvDtype::Int8 ? 4 : 0; }

// Numbers of a head in KV memory, which is padded to whole vectors.
constexpr int64_t padded_dim_of(int64_t dim) { return (dim + 7) / 8 * 8; }
// Bytes of the keys or values of one head in a page: the numbers, then the scales of the rows.
constexpr int64_t kv_block_bytes(KvDtype dtype, int64_t padded_dim) {
    return kPageSize * (padded_dim * kv_dtype_bytes(dtype) + kv_scale_bytes(dtype));
}

// The KV memory of one layer. Keys are transposed within a page, so that one dimension of eight keys is one vector.
struct KvView {
    KvDtype dtype;
    uint8_t* keys;       // [pages, kv heads] blocks of numbers [padded key dim, 16] and scales [16]
    uint8_t* values;     // [pages, kv heads] blocks of numbers [16, padded value dim] and scales; null: latent rows, whose first
                         // numbers are the value
    int64_t kv_heads;
    int64_t key_dim;
    int64_t value_dim;
    int64_t padded_key_dim() const { return padded_dim_of(key_dim); }
    int64_t padded_value_dim() const { return padded_dim_of(value_dim); }
    bool is_latent() const { return values == nullptr; }
};

// Attention of the rows [row_begin, row_end) of one request to one KV head.
struct AttentionTask {
    const int32_t* block_table;   // physical pages of the request in logical order
    const int32_t* prefix_lens;   // [rows], visible committed rows
    const int64_t* ancestor_masks;   // [rows], visible rows after them: bit i is the request's row prefix_len + i
    const float* queries;         // [rows, query stride], rotated; head h at h * key dim
    float* out;                   // [rows, out stride]; head h at h * value dim
    int64_t query_stride;
    int64_t out_stride;
    int64_t row_begin;
    int64_t row_end;
    int64_t kv_head;
    int64_t head_begin;           // query heads [head_begin, head_end), which share the KV head
    int64_t head_end;
    int64_t start;                // KV rows of the request before this one are hidden
    int64_t window;               // a row sees only this many newest positions; 0: all
    float scale;                  // factor of the scores: 1 / sqrt(head dim), unless the layer has another
    float softcap;                // scores become softcap * tanh(score / softcap); 0: they stay
    const float* sinks;           // [heads], a score per head that takes part in the softmax without a position; null: none
    float* scratch;               // attention_scratch_floats() floats
    // [heads, 2, parts] of the task's only row: to the first half, the share of each part of kSharePart positions is added; the
    // second half is memory for the kernel. Null: shares are not wanted.
    float* shares = nullptr;
    int64_t share_parts = 0;
};

// Rows of one head of a recurrent layer within a chunk, in order of position.
struct ChunkRows {
    const float* keys;             // [rows, key stride]
    const float* updates;          // [rows, update stride], what each row adds to the state
    const float* log_decay_sums;   // [rows], sum of log decays from the start of the chunk to the row
    int64_t key_stride, update_stride;
    int64_t count;
};

// New rows of one request in one chunk and one head of a recurrent layer. The output of a row depends on the state before
// the chunk, on the chunk's ring rows, which were committed before this pass, and on its ancestors among the new rows.
struct RecurrentTask {
    int64_t key_dim;
    int64_t value_dim;             // a multiple of 8
    bool is_delta;                 // gated delta rule: the kernel computes the updates; else they are an input
    const float* state;            // [key dim, value dim], before the chunk
    ChunkRows ring_rows;
    int64_t rows;                  // new rows: committed ones, then nodes of a tree
    int64_t committed_rows;
    const int64_t* ancestor_masks; // [nodes], a node's ancestors among the nodes, itself included
    const float* queries;          // [rows, stride]
    const float* keys;             // [rows, stride]
    const float* values;           // [rows, stride]
    int64_t stride;
    const float* log_decay_sums;   // [rows], from the start of the chunk
    const float* betas;            // [rows], beta of the delta rule
    float* updates;                // [rows, out stride]
    float* out;                    // [rows, out stride]
    int64_t out_stride;
};

// The kernels of one instruction set.
struct KernelTable {
    const char* name;
    // y = x W^T for the panels [panel_begin, panel_end); column 0 of the output is the first row of `panel_begin`.
    void (*linear)(const MatrixView&, const ActivationView&, int64_t panel_begin, int64_t panel_end,
                   const LinearOutput&, uint8_t* scratch);
    // Writes row `row` of a packed matrix as floats.
    void (*dequantize_row)(const MatrixView&, int64_t row, float* out);
    // out [n] = x * weight / rms(x).
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
    // Quantises one row of n floats in groups; the last group is padded with zeros.
    void (*quantize)(const float* x, int64_t n, const Grouping&, int8_t* q, float* scale, float* sum);
    // gate = silu(gate) * up.
    void (*silu_mul)(float* gate, const float* up, int64_t n);
    // gate = gelu(gate) * up, in the tanh approximation.
    void (*gelu_mul)(float* gate, const float* up, int64_t n);
    // gate = (up + 1) * gate / (1 + e^(-slope * gate)), with gate clamped to at most `limit` and up to [-limit, limit].
    void (*clamped_mul)(float* gate, const float* up, float limit, float slope, int64_t n);
    // x = cap * tanh(x / cap).
    void (*softcap)(float* x, float cap, int64_t n);
    // Rotary embedding of one head, which pairs dimensions i and i + head dim / 2; cos and sin are [head dim / 2].
    void (*rotate)(float* head, const float* cos, const float* sin, int64_t head_dim);
    // Stores the key and value of one head in a slot. A latent row has no value of its own.
    void (*store_kv)(const KvView&, int64_t slot, int64_t kv_head, const float* key, const float* value);
    void (*attention)(const KvView&, const AttentionTask&);
    // x = x * sigmoid(gate).
    void (*sigmoid_mul)(float* x, const float* gate, int64_t n);
    // x = max(x, 0)^2.
    void (*squared_relu)(float* x, int64_t n);
    // out = the sum of inputs[j] * weights[j] over the kernel_size positions, plus the bias unless it is null; then SiLU,
    // if `with_silu`.
    void (*convolve)(const float* const* inputs, const float* weights, const float* bias, int64_t kernel_size, bool with_silu, int64_t n,
                     float* out);
    // Computes outputs of a recurrent layer, and updates under the delta rule.
    void (*recurrent_rows)(const RecurrentTask&);
    // Computes the state after the given rows of a chunk, which come in `count` pieces. `next` may be `state` itself.
    // `scratch` has kStateChunk * key dim floats.
    void (*update_state)(const float* state, const ChunkRows* pieces, int64_t count, int64_t key_dim, int64_t value_dim, float* next,
                         float* scratch);
};

// Floats of the tiles in an attention task's scratch: a gathered one, and with latent rows one that is expanded to keys and
// values.
constexpr int64_t attention_tile_floats(int64_t padded_dim, bool is_latent) { return (is_latent ? 4 : 2) * kKeyTile * padded_dim; }
// Floats of scratch that an attention task needs: tiles, scores, and the running softmax of every row and head. `padded_dim`
// is that of a key, which is not smaller than a value.
constexpr int64_t attention_scratch_floats(int64_t padded_dim, bool is_latent, int64_t rows, int64_t heads) {
    return attention_tile_floats(padded_dim, is_latent) + kQueryTile * kKeyTile + rows * heads * (2 * padded_dim + 8);
}

constexpr int64_t kFactorHeader = 32;   // bytes of a Factor panel's scales
// Columns of a row in a Factor panel, with padding.
constexpr int64_t factor_columns_of(int64_t cols) { return (cols + 15) / 16 * 16; }

// The fewest tokens of a product that were measured to be faster in tiles of AMX in whole passes: with groups of 64 columns or more, and of 32.
constexpr int64_t kMinTiledTokens = 24, kMinTiledBlockTokens = 64;
constexpr int64_t kTiledTokens = 512;   // most tokens of a block in tiles of AMX
// Bytes of scratch for tiles: 32 outputs for every token, and four panels, unpacked, of up to 16 groups.
constexpr int64_t kTiledScratch = kTiledTokens * 4 * kPanelRows * 4 + 16 * 2 * (2 * kPanelRows * kBlock + 128);

// Bytes of scratch that `linear` needs for a matrix of `cols` columns, per 32 of them: two panels unpacked to bytes with their
// scales and minima; for each token of a block its levels, initial sums, scale and sum, in another order; and for a tile of
// tokens the initial sums. Tiles of AMX need kTiledScratch, which does not depend on the columns.
constexpr int64_t linear_scratch_bytes(int64_t cols) {
    const int64_t blocks = (cols + kMaxGroup - 1) / kMaxGroup * (kMaxGroup / kBlock);
    return blocks * (2 * kPanelRows * kBlock + 128 + (kBlock + 4 * 4) * kTokenBlock + 8 * 8) + 2 * 64 + kTiledScratch;
}

// Bytes after a weight stream that a prefetch may address.
constexpr int64_t kStreamSlack = 4096;

}  // namespace foreword
