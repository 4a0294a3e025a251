// Latent attention (MLA): a token stores one short row, to which the queries of all heads are projected (absorbed form).
#pragma once

#include <cstdint>
#include <vector>

#include "adapter.h"

namespace foreword {

struct LatentShape {
    int64_t kv_rank;      // numbers of a row that hold keys and values of all heads
    int64_t rope_dim;     // rotated numbers of a row, which all heads share
    int64_t nope_dim;     // unrotated dimensions of a head's query
    int64_t value_dim;    // of a head

    int64_t row_dim() const { return kv_rank + rope_dim; }
    int64_t head_dim() const { return nope_dim + rope_dim; }   // of a query
    bool operator==(const LatentShape& other) const {
        return kv_rank == other.kv_rank && rope_dim == other.rope_dim && nope_dim == other.nope_dim && value_dim == other.value_dim;
    }
};

// The layer's input projections are that of the query (or the compressed query) and that of the row. Its query norm is that of
// the compressed query, its key norm that of the first `kv_rank` numbers of the row.
struct Latent {
    LatentShape shape;
    float eps;                    // of these norms
    Matrix query;                 // [heads * head dim, rank], from the compressed query; null: queries are not compressed
    std::vector<Matrix> keys;     // of each head, [kv rank, nope dim]: projects queries to rows
    std::vector<Matrix> values;   // of each head, [value dim, kv rank]

    int64_t bytes() const {
        size_t total = query ? query->bytes() : 0;
        for (const std::vector<Matrix>* matrices : {&keys, &values}) {
            for (const Matrix& matrix : *matrices) total += matrix->bytes();
        }
        return static_cast<int64_t>(total);
    }
};

}  // namespace foreword
