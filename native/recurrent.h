// Recurrent layers: they mix positions by a short convolution and, except LFM2's, a state.
#pragma once

#include <cstdint>
#include <vector>

namespace foreword {

enum class Recurrence { Convolution, Delta, Ssm };   // only a convolution (LFM2), gated delta rule, Mamba-2

struct RecurrentShape {
    Recurrence kind;
    int64_t kernel_size;   // positions that the convolution reads, including the token's own
    int64_t heads;         // of values
    int64_t value_dim;
    int64_t key_heads;     // divides the heads; 0: there is no state but the convolution's last inputs
    int64_t key_dim;

    int64_t value_width() const { return heads * value_dim; }
    int64_t key_width() const { return key_heads * key_dim; }
    // Channels of the convolution. Delta: queries, keys, values; Mamba-2: values, keys (B), queries (C); LFM2: B * x.
    int64_t channels() const { return 2 * key_width() + value_width(); }
    int64_t key_head(int64_t head) const { return head / (heads / key_heads); }
    // Width of a row of the input projections. Delta: channels, gates, a beta logit for each head, a time step for each; Mamba-2:
    // channels, gates, a time step for each head; LFM2: B, C, x.
    int64_t projected_width() const {
        const int64_t per_head = kind == Recurrence::Delta ? 2 : kind == Recurrence::Ssm ? 1 : 0;
        return channels() + (kind == Recurrence::Convolution ? 2 : 1) * value_width() + per_head * heads;
    }
    bool operator==(const RecurrentShape& other) const {
        return kind == other.kind && kernel_size == other.kernel_size && heads == other.heads && value_dim == other.value_dim &&
               key_heads == other.key_heads && key_dim == other.key_dim;
    }
};

struct Recurrent {
    RecurrentShape shape;
    std::vector<float> conv;         // [kernel size, channels], oldest position first
    std::vector<float> conv_bias;    // [channels]; empty: none
    std::vector<float> norm;         // [value dim], used for every head (Delta), or [value width] (Mamba-2)
    std::vector<float> log_decay_rates;   // [heads], log decay per unit of the time step, below 0
    std::vector<float> time_bias;    // [heads], added to the time step
    std::vector<float> skip;         // [heads], factor of the values that are added to the output (Mamba-2's D)
    int64_t norm_groups = 1;         // the norm after Mamba-2 is computed over each group of values
    float min_time_step = 0.0f, max_time_step = 0.0f;   // Mamba-2
    // Weights of RMS norms that give keys the length 1 and queries the length 1 / sqrt(key dim); computed by `prepare`.
    std::vector<float> key_scale, query_scale;

    // Checks the sizes and computes `key_scale` and `query_scale`; throws std::invalid_argument.
    void prepare();
};

constexpr float kKeyEps = 1e-6f;   // added to the sum of squares of a key or query

}  // namespace foreword
