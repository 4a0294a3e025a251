// The Python face of decoders and of their KV memory.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings.h"
#include "decoder.h"
#include "dispatch.h"

namespace foreword {

namespace {

std::vector<float> copied(const Floats& array) { return {array.data(), array.data() + array.shape(0)}; }

std::vector<float> copied(const std::optional<Floats>& array) {
    return array ? copied(*array) : std::vector<float>{};
}

// One array of a batch: its numbers, how many entries it has and how many numbers an entry has.
template <typename T>
struct BatchArray {
    const T* data;
    int64_t entries, numbers;

    explicit BatchArray(nb::handle object) {
        const auto array = nb::cast<nb::ndarray<const T, nb::c_contig, nb::device::cpu>>(object);
        if (array.ndim() < 1 || array.ndim() > 2) throw std::invalid_argument("an array of the batch has the wrong shape");
        data = array.data();
        entries = static_cast<int64_t>(array.shape(0));
        numbers = array.ndim() == 2 ? static_cast<int64_t>(array.shape(1)) : 1;
    }
};

std::vector<std::string> batch_arrays() {
#define ARRAY(type, name, entries, numbers) #name,
    return {FOREWORD_BATCH_ARRAYS(ARRAY)};
#undef ARRAY
}

Batch read_batch(const nb::tuple& arrays, const std::vector<std::pair<int64_t, bool>>& taps) {
    if (arrays.size() != batch_arrays().size()) throw std::invalid_argument("the batch has another number of arrays");
    size_t place = 0;
#define ARRAY(type, name, entries, numbers) const BatchArray<type> name(arrays[place++]);
    FOREWORD_BATCH_ARRAYS(ARRAY)
#undef ARRAY
    const int64_t rows = token_ids.entries, requests = kv_lens.entries, pages = block_tables.numbers;
    const int64_t wanted = logit_rows.entries, copies = kv_copies.entries, hidden_wanted = hidden_rows.entries;
    Batch batch;
#define ARRAY(type, name, count, columns)                                                                          \
    if (name.entries != (count) || (name.entries > 0 && name.numbers != (columns))) {                              \
        throw std::invalid_argument("the arrays of the batch do not fit together: " #name);                        \
    }                                                                                                              \
    batch.name = name.data;
    FOREWORD_BATCH_ARRAYS(ARRAY)
#undef ARRAY
    batch.rows = rows;
    batch.requests = requests;
    batch.pages = pages;
    batch.wanted = wanted;
    batch.copies = copies;
    batch.hidden_wanted = hidden_wanted;
    for (const auto& [layer, normed] : taps) batch.taps.push_back({layer, normed});
    return batch;
}

void forward(Decoder& decoder, KvStore& store, const nb::tuple& arrays, const std::vector<std::pair<int64_t, bool>>& taps,
             const Array<float, 2>& logits, const Array<float, 3>& hidden) {
    const Batch batch = read_batch(arrays, taps);
    const bool room = static_cast<int64_t>(logits.shape(0)) == batch.wanted &&
                      static_cast<int64_t>(logits.shape(1)) == decoder.shape().vocab_size &&
                      hidden.shape(0) == taps.size() && static_cast<int64_t>(hidden.shape(1)) == batch.hidden_wanted &&
                      static_cast<int64_t>(hidden.shape(2)) == decoder.shape().hidden_size;
    if (!room) throw std::invalid_argument("the output arrays do not fit the batch");
    nb::gil_scoped_release free;
    decoder.forward(batch, store, logits.data(), hidden.data());
}

using Rows = nb::ndarray<nb::numpy, float, nb::ndim<5>>;

// Keys [layers, pages, kv heads, numbers, 16] and values [layers, pages, kv heads, 16, numbers] of one kind, as views.
std::pair<Rows, Rows> arrays(KvStore& store, int64_t kind) {
    if (kind < 0 || kind >= static_cast<int64_t>(store.kinds().size())) throw std::invalid_argument("there are no such KV rows");
    const RowKind& rows = store.kinds()[static_cast<size_t>(kind)];
    const KvView first = store.view(static_cast<size_t>(kind), 0);
    const auto layers = static_cast<size_t>(rows.layers), pages = static_cast<size_t>(store.pages());
    const auto heads = static_cast<size_t>(rows.kv_heads), dim = static_cast<size_t>(rows.padded_dim());
    const auto page = static_cast<size_t>(kPageSize);
    const int64_t head = rows.padded_dim() * kPageSize, layer = 2 * store.pages() * rows.kv_heads * head;
    const nb::object owner = nb::find(store);
    return {Rows(first.keys, {layers, pages, heads, dim, page}, owner, {layer, rows.kv_heads * head, head, kPageSize, 1}),
            Rows(first.values, {layers, pages, heads, page, dim}, owner,
                 {layer, rows.kv_heads * head, head, rows.padded_dim(), 1})};
}

void move_rows(KvStore& store, const Array<const int32_t, 2>& copies) {
    const int64_t count = static_cast<int64_t>(copies.shape(0));
    if (count > 0 && copies.shape(1) != 2) throw std::invalid_argument("a copy is a pair of KV rows");
    for (int64_t i = 0; i < 2 * count; ++i) {
        if (copies.data()[i] < 0 || copies.data()[i] >= store.slots()) throw std::invalid_argument("a KV copy is outside the pages");
    }
    nb::gil_scoped_release free;
    for (int64_t layer = 0; layer < store.layers(); ++layer) store.move(layer, copies.data(), count);
}

void bind_kv_store(nb::module_& m) {
    nb::class_<KvStore>(m, "KvStore")
        .def("__init__", [](KvStore* self, int64_t pages, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& kinds) {
            std::vector<RowKind> rows;
            for (const auto& [layers, kv_heads, head_dim] : kinds) rows.push_back({layers, kv_heads, head_dim});
            new (self) KvStore(pages, std::move(rows));
        }, nb::arg("pages"), nb::arg("kinds"))
        .def("arrays", &arrays, nb::arg("kind"))
        .def("move", &move_rows, nb::arg("copies"))
        .def_prop_ro("pages", &KvStore::pages)
        .def_prop_ro("bytes_per_row", &KvStore::bytes_per_row);
}

void bind_decoder(nb::module_& m) {
    nb::class_<Decoder>(m, "Decoder")
        .def("__init__", [](Decoder* self, int64_t vocab_size, int64_t hidden_size, int64_t intermediate_size,
                            int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float rms_norm_eps,
                            const Floats& inverse_frequencies, const std::string& isa, int threads) {
            const DecoderShape shape{vocab_size, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rms_norm_eps};
            new (self) Decoder(shape, kernels_named(isa), checked_threads(threads), copied(inverse_frequencies));
        }, nb::arg("vocab_size"), nb::arg("hidden_size"), nb::arg("intermediate_size"), nb::arg("num_heads"),
           nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("rms_norm_eps"), nb::arg("inverse_frequencies"),
           nb::arg("isa"), nb::arg("threads"))
        .def("add_layer", [](Decoder& self, const Floats& attention_norm, const Floats& mlp_norm,
                             const std::vector<Matrix>& matrices, const std::optional<Floats>& query_norm,
                             const std::optional<Floats>& key_norm) {
            if (matrices.size() != 7) throw std::invalid_argument("a layer has seven matrices");
            self.add_layer({copied(attention_norm), matrices[0], matrices[1], matrices[2], matrices[3], copied(query_norm),
                            copied(key_norm), copied(mlp_norm), matrices[4], matrices[5], matrices[6]});
        }, nb::arg("attention_norm"), nb::arg("mlp_norm"), nb::arg("matrices"), nb::arg("query_norm").none(), nb::arg("key_norm").none())
        .def("set_ends", [](Decoder& self, Matrix embedding, Matrix head, const Floats& final_norm) {
            self.set_ends(std::move(embedding), std::move(head), copied(final_norm));
        }, nb::arg("embedding"), nb::arg("head"), nb::arg("final_norm"))
        .def("forward", &forward, nb::arg("store"), nb::arg("arrays"), nb::arg("taps"), nb::arg("logits"), nb::arg("hidden"))
        .def_prop_ro("threads", &Decoder::threads)
        .def_prop_ro("isa", &Decoder::isa)
        .def_prop_ro("weight_bytes", &Decoder::weight_bytes);
}

}  // namespace

void register_decoder(nb::module_& m) {
    m.attr("BATCH_ARRAYS") = batch_arrays();
    bind_kv_store(m);
    bind_decoder(m);
}

}  // namespace foreword
