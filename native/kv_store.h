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
    int64_t key_dim;
    bool is_latent;   // a row has no values: they are the first numbers of its key

    // Bytes of one layer's keys, and of its values, in a page.
    int64_t key_bytes(KvDtype dtype) const { return kv_heads * kv_block_bytes(dtype, padded_dim_of(key_dim)); }
    int64_t value_bytes(KvDtype dtype) const { return is_latent ? 0 : key_bytes(dtype); }
    int64_t page_bytes(KvDtype dtype) const { return layers * (key_bytes(dtype) + value_bytes(dtype)); }
    bool operator==(const RowKind& other) const {
        return layers == other.layers && kv_heads == other.kv_heads && key_dim == other.key_dim && is_latent == other.is_latent;
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
    // `layer` is the index among the layers of this kind. The view of latent rows has no value dimension.
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
