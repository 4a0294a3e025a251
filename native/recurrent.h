// Recurrent layers: what mixes positions by a short convolution and a state instead of attention.
#pragma once

#include <cstdint>
#include <vector>

namespace foreword {

enum class Recurrence { Convolution, Delta, Ssm };   // after the convolution: nothing, the gated delta rule, Mamba-2

struct RecurrentShape {
    Recurrence kind;
    int64_t kernel;      // positions that the convolution reads, the token's own included
    int64_t heads;       // of values
    int64_t value_dim;
    int64_t key_heads;   // divides the heads; 0: there is no state but the convolution's inputs
    int64_t key_dim;

    int64_t value_width() const { return heads * value_dim; }
    int64_t key_width() const { return key_heads * key_dim; }
    int64_t channels() const { return 2 * key_width() + value_width(); }   // that enter the convolution
    int64_t key_head(int64_t head) const { return head / (heads / key_heads); }
    // Channels, then gates, then numbers per head: strength (delta rule) and time step. A convolution has two gates.
    int64_t projected() const {
        const int64_t per_head = kind == Recurrence::Delta ? 2 : kind == Recurrence::Ssm ? 1 : 0;
        return channels() + (kind == Recurrence::Convolution ? 2 : 1) * value_width() + per_head * heads;
    }
    bool operator==(const RecurrentShape& other) const {
        return kind == other.kind && kernel == other.kernel && heads == other.heads && value_dim == other.value_dim &&
               key_heads == other.key_heads && key_dim == other.key_dim;
    }
};

struct Recurrent {
    RecurrentShape shape;
    std::vector<float> conv;         // [kernel, channels], oldest position first
    std::vector<float> conv_bias;    // [channels]; empty: none
    std::vector<float> norm;         // [value dim] of every head (delta rule), or [values] (Mamba-2)
    std::vector<float> rates;        // [heads], logarithm of the decay per unit of time, below 0
    std::vector<float> time_bias;    // [heads]
    std::vector<float> skip;         // [heads], of what goes past the state (Mamba-2)
    int64_t norm_groups = 1;         // of values after Mamba-2, each normed alone
    float least_step = 0.0f, most_step = 0.0f;   // of time (Mamba-2)
    // Weights of an RMS norm that leaves keys with length 1, and queries with 1 / sqrt(key dim); made by `prepare`.
    std::vector<float> key_scale, query_scale;

    // Throws unless the parts fit each other.
    void prepare();
};

constexpr float kKeyEps = 1e-6f;   // added to a key's sum of squares

}  // namespace foreword
