// KV memory: the keys and values of every kind of row, in pages that all kinds share.
#pragma once

#include <memory>
#include <vector>

#include "packed_matrix.h"
#include "types.h"

namespace foreword {

// Rows of one kind: what one token keeps in some layers.
struct RowKind {
    int64_t layers;
    int64_t kv_heads;
    int64_t head_dim;

    int64_t padded_dim() const { return (head_dim + 7) / 8 * 8; }
    int64_t numbers_per_layer() const { return kv_heads * padded_dim(); }   // of a row's keys, or of its values
    bool operator==(const RowKind& other) const {
        return layers == other.layers && kv_heads == other.kv_heads && head_dim == other.head_dim;
    }
};

class KvStore {
public:
    KvStore(int64_t pages, std::vector<RowKind> kinds, KvNumber number);
    KvStore(const KvStore&) = delete;
    KvStore& operator=(const KvStore&) = delete;

    int64_t pages() const { return pages_; }
    int64_t slots() const { return pages_ * kPageSize; }
    const std::vector<RowKind>& kinds() const { return kinds_; }
    KvNumber number() const { return number_; }
    int64_t layers() const;   // of all kinds
    int64_t bytes_per_row() const;
    KvView view(size_t kind, int64_t layer) const;

    // Copies rows (from, to) in one layer, counted over all kinds. All are read before any is written: a committed
    // path may overlap itself.
    void move(int64_t layer, const int32_t* copies, int64_t count) const;

private:
    int64_t pages_;
    std::vector<RowKind> kinds_;
    KvNumber number_;
    std::vector<std::unique_ptr<Memory>> memory_;   // one per kind: per layer its keys, then its values
};

}  // namespace foreword
