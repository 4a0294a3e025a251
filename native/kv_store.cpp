#include "kv_store.h"

#include <algorithm>
#include <stdexcept>

namespace foreword {

namespace {

// Calls `visit(pointer, bytes)` for every contiguous part of a KV row: each number of a key, the values of each head, scales.
template <typename Visit>
void visit_row(const KvView& kv, int64_t slot, Visit&& visit) {
    const int64_t page = slot / kPageSize, offset = slot % kPageSize, dim = kv.padded_key_dim(), bytes = kv_dtype_bytes(kv.dtype);
    const int64_t scale_bytes = kv_scale_bytes(kv.dtype), scale_offset = kPageSize * dim * bytes + offset * scale_bytes;
    for (int64_t head = 0; head < kv.kv_heads; ++head) {
        const int64_t base = (page * kv.kv_heads + head) * kv_block_bytes(kv.dtype, dim);
        for (int64_t d = 0; d < dim; ++d) visit(kv.keys + base + (d * kPageSize + offset) * bytes, bytes);
        visit(kv.keys + base + scale_offset, scale_bytes);
        if (kv.is_latent()) continue;
        visit(kv.values + base + offset * dim * bytes, dim * bytes);
        visit(kv.values + base + scale_offset, scale_bytes);
    }
}

}  // namespace

KvStore::KvStore(int64_t pages, std::vector<RowKind> kinds, KvDtype dtype)
    : pages_(pages), kinds_(std::move(kinds)), dtype_(dtype) {
    if (pages < 0 || kinds_.empty()) throw std::invalid_argument("a KV store needs pages and at least one kind of row");
    for (const RowKind& kind : kinds_) {
        if (kind.layers < 1 || kind.kv_heads < 1 || kind.key_dim < 1) {
            throw std::invalid_argument("a KV row must have layers, heads and a head dimension");
        }
        if (kind.is_latent && dtype == KvDtype::Int8) throw std::invalid_argument("latent rows cannot be stored as int8");
        // In small pages: the first row of a layer would make a whole large page resident.
        memory_.push_back(std::make_unique<Memory>(static_cast<size_t>(pages * kind.page_bytes(dtype)), false));
    }
}

int64_t KvStore::layers() const {
    int64_t total = 0;
    for (const RowKind& kind : kinds_) total += kind.layers;
    return total;
}

int64_t KvStore::bytes_per_row() const {
    int64_t bytes = 0;
    for (const RowKind& kind : kinds_) bytes += kind.page_bytes(dtype_);
    return bytes / kPageSize;
}

KvView KvStore::view(size_t kind, int64_t layer) const {
    const RowKind& rows = kinds_[kind];
    const int64_t key_bytes = pages_ * rows.key_bytes(dtype_), value_bytes = pages_ * rows.value_bytes(dtype_);
    uint8_t* keys = memory_[kind]->data() + layer * (key_bytes + value_bytes);
    return {dtype_, keys, rows.is_latent ? nullptr : keys + key_bytes, rows.kv_heads, rows.key_dim, rows.is_latent ? 0 : rows.key_dim};
}

void KvStore::copy_rows(int64_t layer, const int32_t* copies, int64_t count) const {
    size_t kind = 0;
    while (layer >= kinds_[kind].layers) layer -= kinds_[kind++].layers;
    const KvView kv = view(kind, layer);
    std::vector<uint8_t> rows;
    for (int64_t i = 0; i < count; ++i) {
        visit_row(kv, copies[2 * i], [&](const uint8_t* from, int64_t bytes) { rows.insert(rows.end(), from, from + bytes); });
    }
    const uint8_t* next = rows.data();
    for (int64_t i = 0; i < count; ++i) {
        visit_row(kv, copies[2 * i + 1], [&](uint8_t* to, int64_t bytes) {
            std::copy_n(next, bytes, to);
            next += bytes;
        });
    }
}

}  // namespace foreword
