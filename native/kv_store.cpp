#include "kv_store.h"

#include <algorithm>
#include <stdexcept>

namespace foreword {

namespace {

// Visits the bytes of one KV row: every key by itself, values head by head.
template <typename Visit>
void visit_row(const KvView& kv, int64_t slot, Visit&& visit) {
    const int64_t page = slot / kPageSize, offset = slot % kPageSize, dim = kv.padded_dim, size = kv_number_bytes(kv.number);
    for (int64_t head = 0; head < kv.kv_heads; ++head) {
        const int64_t base = (page * kv.kv_heads + head) * dim * kPageSize;
        for (int64_t d = 0; d < dim; ++d) visit(kv.keys + (base + d * kPageSize + offset) * size, size);
        visit(kv.values + (base + offset * dim) * size, dim * size);
    }
}

}  // namespace

KvStore::KvStore(int64_t pages, std::vector<RowKind> kinds, KvNumber number)
    : pages_(pages), kinds_(std::move(kinds)), number_(number) {
    if (pages < 0 || kinds_.empty()) throw std::invalid_argument("a KV store needs pages and at least one kind of row");
    for (const RowKind& kind : kinds_) {
        if (kind.layers < 1 || kind.kv_heads < 1 || kind.head_dim < 1) {
            throw std::invalid_argument("a KV row must have layers, heads and numbers");
        }
        const int64_t numbers = slots() * 2 * kind.layers * kind.numbers_per_layer();
        // Small pages: a large one would be filled by the first row of every layer.
        memory_.push_back(std::make_unique<Memory>(static_cast<size_t>(numbers * kv_number_bytes(number)), false));
    }
}

int64_t KvStore::layers() const {
    int64_t total = 0;
    for (const RowKind& kind : kinds_) total += kind.layers;
    return total;
}

int64_t KvStore::bytes_per_row() const {
    int64_t numbers = 0;
    for (const RowKind& kind : kinds_) numbers += 2 * kind.layers * kind.numbers_per_layer();
    return numbers * kv_number_bytes(number_);
}

KvView KvStore::view(size_t kind, int64_t layer) const {
    const RowKind& rows = kinds_[kind];
    const int64_t size = slots() * rows.numbers_per_layer() * kv_number_bytes(number_);   // of one layer's keys
    uint8_t* keys = memory_[kind]->data() + 2 * layer * size;
    return {number_, keys, keys + size, rows.kv_heads, rows.head_dim, rows.padded_dim()};
}

void KvStore::move(int64_t layer, const int32_t* copies, int64_t count) const {
    size_t kind = 0;
    while (layer >= kinds_[kind].layers) layer -= kinds_[kind++].layers;
    const KvView kv = view(kind, layer);
    std::vector<uint8_t> kept;
    for (int64_t i = 0; i < count; ++i) {
        visit_row(kv, copies[2 * i], [&](const uint8_t* p, int64_t n) { kept.insert(kept.end(), p, p + n); });
    }
    const uint8_t* next = kept.data();
    for (int64_t i = 0; i < count; ++i) {
        visit_row(kv, copies[2 * i + 1], [&](uint8_t* p, int64_t n) {
            std::copy_n(next, n, p);
            next += n;
        });
    }
}

}  // namespace foreword
