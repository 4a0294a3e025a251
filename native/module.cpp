// The Python face of the kernels: arrays come in as views, without copies.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "decoder.h"
#include "dispatch.h"
#include "sampler.h"

namespace nb = nanobind;
using namespace foreword;

namespace {

template <typename T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
using Floats = Array<const float, 1>;
using Ints = Array<const int32_t, 1>;

int64_t length(const Ints& array) { return static_cast<int64_t>(array.shape(0)); }

std::vector<float> copied(const Floats& array) { return {array.data(), array.data() + array.shape(0)}; }

std::vector<float> copied(const std::optional<Floats>& array) {
    return array ? copied(*array) : std::vector<float>{};
}

Form block_form(const std::string& kind) {
    if (kind == "Q8_0") return Form::Q8;
    if (kind == "Q4_0") return Form::Q4_0;
    if (kind == "Q4_1") return Form::Q4_1;
    throw std::invalid_argument("blocks of kind " + kind + " are not supported");
}

std::string form_name(const PackedMatrix& matrix) {
    switch (matrix.view().form) {
        case Form::F32: return "f32";
        case Form::Q8: return matrix.view().grouping.rotated ? "int8-rotated" : "int8";
        case Form::Q4_0: return "q4_0";
        case Form::Q4_1: return "q4_1";
    }
    return "";
}

int64_t block_columns(Form form, const Array<const uint8_t, 2>& blocks) {
    const int64_t bytes = static_cast<int64_t>(blocks.shape(1)), size = gguf_block_bytes(form);
    if (bytes % size != 0) throw std::invalid_argument("a row is not a whole number of blocks");
    return bytes / size * kBlock;
}

Grouping checked(int64_t group, bool rotated) {
    const bool fits = group >= kBlock && group <= kMaxGroup && group % (rotated ? kRotation : kBlock) == 0;
    if (!fits) throw std::invalid_argument("the group size must be a multiple of 32 (rotated: 64), at most 192");
    return {group, rotated};
}

int checked_threads(int threads) {
    if (threads < 1) throw std::invalid_argument("the number of threads must be at least 1");
    return threads;
}

Matrix keep_floats(Arena& arena, const Array<const float, 2>& values) {
    nb::gil_scoped_release free;
    return PackedMatrix::keep_floats(arena, values.data(), static_cast<int64_t>(values.shape(0)), static_cast<int64_t>(values.shape(1)));
}

Matrix keep_blocks(Arena& arena, const std::string& kind, const Array<const uint8_t, 2>& blocks) {
    const Form form = block_form(kind);
    const int64_t cols = block_columns(form, blocks);
    nb::gil_scoped_release free;
    return PackedMatrix::keep_blocks(arena, form, blocks.data(), static_cast<int64_t>(blocks.shape(0)), cols);
}

Matrix round_floats(Arena& arena, const Array<const float, 2>& values, int64_t group, bool rotated,
                    const std::string& isa, int threads) {
    const int64_t cols = static_cast<int64_t>(values.shape(1));
    const auto fill = [&](int64_t row, float* out) { std::copy_n(values.data() + row * cols, cols, out); };
    const KernelTable& kernels = kernels_named(isa);
    nb::gil_scoped_release free;
    return PackedMatrix::round_rows(arena, fill, static_cast<int64_t>(values.shape(0)), cols, checked(group, rotated), kernels,
                                    checked_threads(threads));
}

Matrix round_blocks(Arena& arena, const std::string& kind, const Array<const uint8_t, 2>& blocks, int64_t group,
                    bool rotated, const std::string& isa, int threads) {
    const Form form = block_form(kind);
    const int64_t cols = block_columns(form, blocks), row_bytes = static_cast<int64_t>(blocks.shape(1));
    const auto fill = [&](int64_t row, float* out) { expand_blocks(form, blocks.data() + row * row_bytes, cols, out); };
    const KernelTable& kernels = kernels_named(isa);
    nb::gil_scoped_release free;
    return PackedMatrix::round_rows(arena, fill, static_cast<int64_t>(blocks.shape(0)), cols, checked(group, rotated), kernels,
                                    checked_threads(threads));
}

// out = x W^T + bias, the input quantised as a pass would do it. For tests.
void multiply(const PackedMatrix& matrix, const Array<const float, 2>& x, const Array<float, 2>& out, const std::string& isa) {
    const KernelTable& kernels = kernels_named(isa);
    const MatrixView& w = matrix.view();
    const int64_t rows = static_cast<int64_t>(x.shape(0));
    if (static_cast<int64_t>(x.shape(1)) != w.cols || static_cast<int64_t>(out.shape(1)) != w.rows || out.shape(0) != x.shape(0)) {
        throw std::invalid_argument("the shapes of input, matrix and output do not fit");
    }
    std::vector<int8_t> q(static_cast<size_t>(rows * w.groups * w.grouping.group));
    std::vector<float> scale(static_cast<size_t>(rows * w.groups)), sum(scale.size());
    std::vector<uint8_t> scratch(static_cast<size_t>(linear_scratch(w.cols)));
    for (int64_t row = 0; w.form != Form::F32 && row < rows; ++row) {
        kernels.quantize(x.data() + row * w.cols, w.cols, w.grouping, q.data() + row * w.groups * w.grouping.group,
                         scale.data() + row * w.groups, sum.data() + row * w.groups);
    }
    const ActivationView input{rows, w.cols, w.groups, q.data(), scale.data(), sum.data(), const_cast<float*>(x.data())};
    kernels.linear(w, input, 0, matrix.panels(), {out.data(), w.rows, matrix.bias(), false}, scratch.data());
}

void expand_row(const PackedMatrix& matrix, int64_t row, const Array<float, 1>& out, const std::string& isa) {
    if (row < 0 || row >= matrix.view().rows || static_cast<int64_t>(out.shape(0)) != matrix.view().cols) {
        throw std::invalid_argument("the matrix has no such row, or the output is not as long as one");
    }
    kernels_named(isa).dequantize_row(matrix.view(), row, out.data());
}

// q [groups * group], scale and sum [groups]. For tests.
void quantize(const Floats& x, int64_t group, bool rotated, const Array<int8_t, 1>& q, const Array<float, 1>& scale,
              const Array<float, 1>& sum, const std::string& isa) {
    const Grouping grouping = checked(group, rotated);
    const int64_t n = static_cast<int64_t>(x.shape(0)), groups = (n + group - 1) / group;
    if (static_cast<int64_t>(q.shape(0)) != groups * group || static_cast<int64_t>(scale.shape(0)) != groups ||
        static_cast<int64_t>(sum.shape(0)) != groups) {
        throw std::invalid_argument("the outputs do not fit the number of groups");
    }
    kernels_named(isa).quantize(x.data(), n, grouping, q.data(), scale.data(), sum.data());
}

void rms_norm(const Floats& x, const Floats& weight, float eps, const Array<float, 1>& out, const std::string& isa) {
    if (weight.shape(0) != x.shape(0) || out.shape(0) != x.shape(0)) throw std::invalid_argument("lengths differ");
    kernels_named(isa).rms_norm(x.data(), weight.data(), eps, static_cast<int64_t>(x.shape(0)), out.data());
}

void silu_mul(const Array<float, 1>& gate, const Floats& up, const std::string& isa) {
    if (gate.shape(0) != up.shape(0)) throw std::invalid_argument("lengths differ");
    kernels_named(isa).silu_mul(gate.data(), up.data(), static_cast<int64_t>(gate.shape(0)));
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const KernelTable* table : supported_kernels()) names.emplace_back(table->name);
    return names;
}

// Arguments of Decoder.forward that are arrays with one entry per row must agree on the number of rows.
void forward(Decoder& decoder, KvStore& store, const Ints& token_ids, const Ints& positions, const Ints& slots, const Ints& prefix_lens,
            const Array<const int64_t, 2>& masks, const Ints& row_starts, const Array<const int32_t, 2>& block_tables,
            const Ints& kv_lens, const Ints& logit_rows, const Array<const int32_t, 2>& kv_copies, const Ints& hidden_rows,
            const std::vector<std::pair<int64_t, bool>>& taps, const Array<float, 2>& logits, const Array<float, 3>& hidden) {
    const int64_t rows = length(token_ids), requests = length(kv_lens), wanted = length(logit_rows);
    const bool fits = length(positions) == rows && length(slots) == rows && length(prefix_lens) == rows &&
                      static_cast<int64_t>(masks.shape(0)) == rows && masks.shape(1) == 1 && length(row_starts) == requests + 1 &&
                      static_cast<int64_t>(block_tables.shape(0)) == requests && (kv_copies.shape(0) == 0 || kv_copies.shape(1) == 2);
    if (!fits) throw std::invalid_argument("the arrays of the batch do not fit together");
    const bool room = static_cast<int64_t>(logits.shape(0)) == wanted &&
                      static_cast<int64_t>(logits.shape(1)) == decoder.shape().vocab_size &&
                      hidden.shape(0) == taps.size() && static_cast<int64_t>(hidden.shape(1)) == length(hidden_rows) &&
                      static_cast<int64_t>(hidden.shape(2)) == decoder.shape().hidden_size;
    if (!room) throw std::invalid_argument("the output arrays do not fit the batch");
    std::vector<Tap> places;
    for (const auto& [layer, normed] : taps) places.push_back({layer, normed});
    const Batch batch{rows, requests, static_cast<int64_t>(block_tables.shape(1)), wanted,
                      static_cast<int64_t>(kv_copies.shape(0)), length(hidden_rows), token_ids.data(), positions.data(),
                      slots.data(), prefix_lens.data(), masks.data(), row_starts.data(), block_tables.data(),
                      kv_lens.data(), logit_rows.data(), kv_copies.data(), hidden_rows.data(), places};
    nb::gil_scoped_release free;
    decoder.forward(batch, store, logits.data(), hidden.data());
}

void bind_matrix(nb::module_& m) {
    nb::class_<Arena>(m, "Arena").def(nb::init<>());
    nb::class_<PackedMatrix>(m, "PackedMatrix")
        .def_static("keep_floats", &keep_floats, nb::arg("arena"), nb::arg("values"))
        .def_static("keep_blocks", &keep_blocks, nb::arg("arena"), nb::arg("kind"), nb::arg("blocks"))
        .def_static("round_floats", &round_floats, nb::arg("arena"), nb::arg("values"), nb::arg("group"), nb::arg("rotated"), nb::arg("isa"),
                    nb::arg("threads"))
        .def_static("round_blocks", &round_blocks, nb::arg("arena"), nb::arg("kind"), nb::arg("blocks"), nb::arg("group"), nb::arg("rotated"),
                    nb::arg("isa"), nb::arg("threads"))
        .def("set_bias", [](PackedMatrix& self, const Floats& bias) { self.set_bias(bias.data(), static_cast<int64_t>(bias.shape(0))); },
             nb::arg("bias"))
        .def("multiply", &multiply, nb::arg("x"), nb::arg("out"), nb::arg("isa"))
        .def("expand_row", &expand_row, nb::arg("row"), nb::arg("out"), nb::arg("isa"))
        .def_prop_ro("rows", [](const PackedMatrix& self) { return self.view().rows; })
        .def_prop_ro("cols", [](const PackedMatrix& self) { return self.view().cols; })
        .def_prop_ro("group", [](const PackedMatrix& self) { return self.view().grouping.group; })
        .def_prop_ro("form", &form_name)
        .def_prop_ro("nbytes", &PackedMatrix::bytes);
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
        .def("forward", &forward, nb::arg("store"), nb::arg("token_ids"), nb::arg("positions"), nb::arg("slots"), nb::arg("prefix_lens"),
             nb::arg("masks"), nb::arg("row_starts"), nb::arg("block_tables"), nb::arg("kv_lens"), nb::arg("logit_rows"),
             nb::arg("kv_copies"), nb::arg("hidden_rows"), nb::arg("taps"), nb::arg("logits"), nb::arg("hidden"))
        .def_prop_ro("threads", &Decoder::threads)
        .def_prop_ro("isa", &Decoder::isa)
        .def_prop_ro("weight_bytes", &Decoder::weight_bytes);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Packed matrices and whole decoder passes on the CPU.";
    m.attr("PAGE_SIZE") = kPageSize;
    m.def("instruction_sets", &instruction_sets, "Instruction sets that this build and CPU have, the fastest first.");
    m.def("quantize", &quantize, nb::arg("x"), nb::arg("group"), nb::arg("rotated"), nb::arg("q"), nb::arg("scale"),
          nb::arg("total"), nb::arg("isa"));
    m.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"), nb::arg("isa"));
    m.def("silu_mul", &silu_mul, nb::arg("gate"), nb::arg("up"), nb::arg("isa"));
    bind_matrix(m);
    bind_kv_store(m);
    bind_decoder(m);
    register_sampler(m);
}
