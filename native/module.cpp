// The Python face of the kernels: arrays come in as views, without copies.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "adapter.h"
#include "bindings.h"
#include "decoder.h"
#include "dispatch.h"
#include "sampler.h"

using namespace foreword;

namespace {

struct BlockKind {
    Form form;
    const char *kind, *name;   // in GGUF files, and as a matrix's form
};
constexpr BlockKind kBlockKinds[] = {
    {Form::Q8, "Q8_0", "int8"},   {Form::Q4_0, "Q4_0", "q4_0"}, {Form::Q4_1, "Q4_1", "q4_1"}, {Form::Q5_0, "Q5_0", "q5_0"},
    {Form::Q5_1, "Q5_1", "q5_1"}, {Form::Q4_K, "Q4_K", "q4_k"}, {Form::Q5_K, "Q5_K", "q5_k"}, {Form::Q6_K, "Q6_K", "q6_k"},
    {Form::Q4_Z, "Q4_Z", "q4_z"},
};

Form block_form(const std::string& kind) {
    for (const BlockKind& named : kBlockKinds) {
        if (kind == named.kind) return named.form;
    }
    throw std::invalid_argument("blocks of kind " + kind + " are not supported");
}

std::string form_name(const PackedMatrix& matrix) {
    const MatrixView& w = matrix.view();
    if (w.grouping.rotated) return "int8-rotated";
    for (const BlockKind& named : kBlockKinds) {
        if (w.form == named.form) return named.name;
    }
    return w.form == Form::F32 ? "f32" : "factor";
}

int64_t block_columns(Form form, const Array<const uint8_t, 2>& blocks) {
    const int64_t bytes = static_cast<int64_t>(blocks.shape(1)), size = gguf_block_bytes(form);
    if (bytes % size != 0) throw std::invalid_argument("a row is not a whole number of blocks");
    return bytes / size * gguf_block_columns(form);
}

void dequantize(const std::string& kind, const Array<const uint8_t, 2>& blocks, const Array<float, 2>& out) {
    const Form form = block_form(kind);
    const int64_t cols = block_columns(form, blocks), rows = static_cast<int64_t>(blocks.shape(0));
    if (static_cast<int64_t>(out.shape(0)) != rows || static_cast<int64_t>(out.shape(1)) != cols) {
        throw std::invalid_argument("the output does not have the shape of the blocks");
    }
    nb::gil_scoped_release free;
    for (int64_t row = 0; row < rows; ++row) {
        expand_blocks(form, blocks.data() + row * static_cast<int64_t>(blocks.shape(1)), cols, out.data() + row * cols);
    }
}

Grouping checked(int64_t group, bool rotated) {
    const bool fits = group >= kBlock && group <= kMaxGroup && group % (rotated ? kRotation : kBlock) == 0;
    if (!fits) throw std::invalid_argument("the group size must be a multiple of 32 (rotated: 64), at most 192");
    return {group, rotated};
}

Matrix keep_floats(Arena& arena, const Array<const float, 2>& values) {
    nb::gil_scoped_release free;
    return PackedMatrix::keep_floats(arena, values.data(), static_cast<int64_t>(values.shape(0)), static_cast<int64_t>(values.shape(1)));
}

Matrix keep_blocks(Arena& arena, const std::string& kind, const Array<const uint8_t, 2>& blocks, int threads) {
    const Form form = block_form(kind);
    const int64_t cols = block_columns(form, blocks);
    const int workers = checked_threads(threads);
    nb::gil_scoped_release free;
    return PackedMatrix::keep_blocks(arena, form, blocks.data(), static_cast<int64_t>(blocks.shape(0)), cols, workers);
}

Matrix rounded(Arena& arena, int64_t rows, int64_t cols, int64_t group, bool rotated) {
    if (rows < 1 || cols < 1) throw std::invalid_argument("a matrix has at least one row and one column");
    return PackedMatrix::rounded(arena, rows, cols, checked(group, rotated));
}

// Rows from `first` on; the whole matrix need not be there at once.
void round_rows(PackedMatrix& matrix, int64_t first, const Array<const float, 2>& values, const std::string& isa, int threads) {
    const int64_t count = static_cast<int64_t>(values.shape(0)), cols = matrix.view().cols;
    const bool fits = first >= 0 && first % kPanelRows == 0 && count <= matrix.view().rows - first && static_cast<int64_t>(values.shape(1)) == cols;
    if (!fits || matrix.view().form != Form::Q8) {
        throw std::invalid_argument("the rows do not fit the matrix, or do not begin at a multiple of 8");
    }
    const auto fill = [&](int64_t row, float* out) { std::copy_n(values.data() + (row - first) * cols, cols, out); };
    const KernelTable& kernels = kernels_named(isa);
    const int workers = checked_threads(threads);
    nb::gil_scoped_release free;
    matrix.round_rows(fill, first, count, kernels, workers);
}

Matrix round_floats(Arena& arena, const Array<const float, 2>& values, int64_t group, bool rotated,
                    const std::string& isa, int threads) {
    const Matrix matrix = rounded(arena, static_cast<int64_t>(values.shape(0)), static_cast<int64_t>(values.shape(1)), group, rotated);
    round_rows(*matrix, 0, values, isa, threads);
    return matrix;
}

Matrix round_blocks(Arena& arena, const std::string& kind, const Array<const uint8_t, 2>& blocks, int64_t group,
                    bool rotated, const std::string& isa, int threads) {
    const Form form = block_form(kind);
    const int64_t cols = block_columns(form, blocks), row_bytes = static_cast<int64_t>(blocks.shape(1));
    const auto fill = [&](int64_t row, float* out) { expand_blocks(form, blocks.data() + row * row_bytes, cols, out); };
    const KernelTable& kernels = kernels_named(isa);
    const int workers = checked_threads(threads);
    const int64_t rows = static_cast<int64_t>(blocks.shape(0));
    const Grouping grouping = checked(group, rotated);
    nb::gil_scoped_release free;
    const Matrix matrix = PackedMatrix::rounded(arena, rows, cols, grouping);
    matrix->round_rows(fill, 0, rows, kernels, workers);
    return matrix;
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

void bind_matrix(nb::module_& m) {
    nb::list kinds;
    for (const BlockKind& named : kBlockKinds) kinds.append(named.kind);
    m.attr("BLOCK_KINDS") = kinds;
    m.def("dequantize", &dequantize, nb::arg("kind"), nb::arg("blocks"), nb::arg("out"));
    nb::class_<Arena>(m, "Arena").def(nb::init<>());
    nb::class_<PackedMatrix>(m, "PackedMatrix")
        .def_static("keep_floats", &keep_floats, nb::arg("arena"), nb::arg("values"))
        .def_static("round_factor", [](Arena& arena, const Array<const float, 2>& values) {
            if (values.shape(1) < 1 || static_cast<int64_t>(values.shape(1)) > kMaxRank) throw std::invalid_argument("a factor has 1 to 128 columns");
            return PackedMatrix::round_factor(arena, values.data(), static_cast<int64_t>(values.shape(0)), static_cast<int64_t>(values.shape(1)));
        }, nb::arg("arena"), nb::arg("values"))
        .def_static("keep_blocks", &keep_blocks, nb::arg("arena"), nb::arg("kind"), nb::arg("blocks"), nb::arg("threads"))
        .def_static("rounded", &rounded, nb::arg("arena"), nb::arg("rows"), nb::arg("cols"), nb::arg("group"), nb::arg("rotated"))
        .def("round_rows", &round_rows, nb::arg("first"), nb::arg("values"), nb::arg("isa"), nb::arg("threads"))
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
    register_decoder(m);
    register_head(m);
    register_sampler(m);
}
