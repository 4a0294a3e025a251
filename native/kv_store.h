// KV memory: keys and values in pages. A page has the rows of every kind: those of the decoder, and those of draft heads.
#pragma once

#include <memory>
#include <vector>

#include "packed_matrix.h"
#include "types.h"

namespace foreword {

// One kind of KV row: the layers of a decoder or a draft head in which a token has keys and values.
struct RowKind {
    int64_t layers;
    int64_t kv_heads;
    int64_t head_dim;

    int64_t padded_dim() const { return (head_dim + 7) / 8 * 8; }
    int64_t values_per_layer() const { return kv_heads * padded_dim(); }   // numbers of a row's keys, and of its values
    bool operator==(const RowKind& other) const {
        return layers == other.layers && kv_heads == other.kv_heads && head_dim == other.head_dim;
    }
};

class KvStore {
public:
    KvStore(int64_t pages, std::vector<RowKind> kinds, KvDtype dtype);
    KvStore(const KvStore&) = delete;
    KvStore& operator=(const KvStore&) = delete;

    int64_t pages() const { return pages_; }
    int64_t slots() const { return pages_ * kPageSize; }
    const std::vector<RowKind>& kinds() const { return kinds_; }
    KvDtype dtype() const { return dtype_; }
    int64_t layers() const;   // of all kinds
    int64_t bytes_per_row() const;
    // `layer` is the index among the layers of this kind.
    KvView view(size_t kind, int64_t layer) const;

    // Copies the KV rows of slots (from, to) in one layer; `layer` is the index among the layers of all kinds. All rows are
    // read before any is written, because the rows of a committed path may overlap.
    void copy_rows(int64_t layer, const int32_t* copies, int64_t count) const;

private:
    int64_t pages_;
    std::vector<RowKind> kinds_;
    KvDtype dtype_;
    std::vector<std::unique_ptr<Memory>> memory_;   // one per kind: the keys, then the values of each layer
};

}  // namespace foreword
