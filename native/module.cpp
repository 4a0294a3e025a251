// The Python module of the kernels, with the bindings of matrices. Arrays are read as views, without copies.
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
    WeightFormat format;
    const char *kind, *name;   // its names: in GGUF files, and PackedMatrix.format in Python
};
constexpr BlockKind kBlockKinds[] = {
    {WeightFormat::Q8, "Q8_0", "int8"},   {WeightFormat::Q4_0, "Q4_0", "q4_0"}, {WeightFormat::Q4_1, "Q4_1", "q4_1"},
    {WeightFormat::Q5_0, "Q5_0", "q5_0"}, {WeightFormat::Q5_1, "Q5_1", "q5_1"}, {WeightFormat::Q4_K, "Q4_K", "q4_k"},
    {WeightFormat::Q5_K, "Q5_K", "q5_k"}, {WeightFormat::Q6_K, "Q6_K", "q6_k"}, {WeightFormat::Q4_Z, "Q4_Z", "q4_z"},
};

WeightFormat block_format(const std::string& kind) {
    for (const BlockKind& block_kind : kBlockKinds) {
        if (kind == block_kind.kind) return block_kind.format;
    }
    throw std::invalid_argument("the CPU kernels do not read blocks of kind " + kind);
}

std::string format_name(const PackedMatrix& matrix) {
    const MatrixView& w = matrix.view();
    if (w.grouping.is_rotated) return "int8-rotated";
    for (const BlockKind& block_kind : kBlockKinds) {
        if (w.format == block_kind.format) return block_kind.name;
    }
    return w.format == WeightFormat::F32 ? "f32" : "factor";
}

// Returns the columns of a matrix of blocks [rows, bytes of a row].
int64_t block_columns(WeightFormat format, const Array<const uint8_t, 2>& blocks) {
    const int64_t row_bytes = static_cast<int64_t>(blocks.shape(1)), block_bytes = gguf_block_bytes(format);
    if (row_bytes % block_bytes != 0) throw std::invalid_argument("a row is not a whole number of blocks");
    return row_bytes / block_bytes * gguf_block_columns(format);
}

void dequantize(const std::string& kind, const Array<const uint8_t, 2>& blocks, const Array<float, 2>& out) {
    const WeightFormat format = block_format(kind);
    const int64_t cols = block_columns(format, blocks), rows = static_cast<int64_t>(blocks.shape(0));
    if (static_cast<int64_t>(out.shape(0)) != rows || static_cast<int64_t>(out.shape(1)) != cols) {
        throw std::invalid_argument("the output does not have the shape of the blocks");
    }
    nb::gil_scoped_release release;
    for (int64_t row = 0; row < rows; ++row) {
        expand_blocks(format, blocks.data() + row * static_cast<int64_t>(blocks.shape(1)), cols, out.data() + row * cols);
    }
}

Grouping checked_grouping(int64_t group_size, bool is_rotated) {
    const bool fits = group_size >= kBlock && group_size <= kMaxGroup && group_size % (is_rotated ? kRotation : kBlock) == 0;
    if (!fits) throw std::invalid_argument("the group size must be a multiple of 32 (rotated: 64), at most 192");
    return {group_size, is_rotated};
}

Matrix keep_floats(Arena& arena, const Array<const float, 2>& values) {
    nb::gil_scoped_release release;
    return PackedMatrix::keep_floats(arena, values.data(), static_cast<int64_t>(values.shape(0)), static_cast<int64_t>(values.shape(1)));
}

Matrix keep_blocks(Arena& arena, const std::string& kind, const Array<const uint8_t, 2>& blocks, int threads) {
    const WeightFormat format = block_format(kind);
    const int64_t cols = block_columns(format, blocks);
    const int workers = checked_threads(threads);
    nb::gil_scoped_release release;
    return PackedMatrix::keep_blocks(arena, format, blocks.data(), static_cast<int64_t>(blocks.shape(0)), cols, workers);
}

Matrix zeros_int8(Arena& arena, int64_t rows, int64_t cols, int64_t group_size, bool is_rotated) {
    if (rows < 1 || cols < 1) throw std::invalid_argument("a matrix has at least one row and one column");
    return PackedMatrix::zeros_int8(arena, rows, cols, checked_grouping(group_size, is_rotated));
}

// Sets the rows of an 8-bit matrix from the row `first` on, so that a matrix can be loaded in pieces.
void round_rows(PackedMatrix& matrix, int64_t first, const Array<const float, 2>& values, const std::string& isa, int threads) {
    const int64_t count = static_cast<int64_t>(values.shape(0)), cols = matrix.view().cols;
    const bool fits = first >= 0 && first % kPanelRows == 0 && count <= matrix.view().rows - first && static_cast<int64_t>(values.shape(1)) == cols;
    if (!fits || matrix.view().format != WeightFormat::Q8) {
        throw std::invalid_argument("the rows do not fit the matrix, or do not begin at a multiple of 8");
    }
    const auto fill = [&](int64_t row, float* out) { std::copy_n(values.data() + (row - first) * cols, cols, out); };
    const KernelTable& kernels = kernels_named(isa);
    const int workers = checked_threads(threads);
    nb::gil_scoped_release release;
    matrix.round_rows(fill, first, count, kernels, workers);
}

Matrix round_floats(Arena& arena, const Array<const float, 2>& values, int64_t group_size, bool is_rotated,
                    const std::string& isa, int threads) {
    const Matrix matrix = zeros_int8(arena, static_cast<int64_t>(values.shape(0)), static_cast<int64_t>(values.shape(1)), group_size, is_rotated);
    round_rows(*matrix, 0, values, isa, threads);
    return matrix;
}

Matrix round_blocks(Arena& arena, const std::string& kind, const Array<const uint8_t, 2>& blocks, int64_t group_size,
                    bool is_rotated, const std::string& isa, int threads) {
    const WeightFormat format = block_format(kind);
    const int64_t cols = block_columns(format, blocks), row_bytes = static_cast<int64_t>(blocks.shape(1));
    const auto fill = [&](int64_t row, float* out) { expand_blocks(format, blocks.data() + row * row_bytes, cols, out); };
    const KernelTable& kernels = kernels_named(isa);
    const int workers = checked_threads(threads);
    const int64_t rows = static_cast<int64_t>(blocks.shape(0));
    const Grouping grouping = checked_grouping(group_size, is_rotated);
    nb::gil_scoped_release release;
    const Matrix matrix = PackedMatrix::zeros_int8(arena, rows, cols, grouping);
    matrix->round_rows(fill, 0, rows, kernels, workers);
    return matrix;
}

// out = x W^T + bias; the input is quantised as in a pass. Used by Medusa and Markov heads, and by tests.
void multiply(const PackedMatrix& matrix, const Array<const float, 2>& x, const Array<float, 2>& out, const std::string& isa) {
    const KernelTable& kernels = kernels_named(isa);
    const MatrixView& w = matrix.view();
    const int64_t rows = static_cast<int64_t>(x.shape(0));
    if (static_cast<int64_t>(x.shape(1)) != w.cols || static_cast<int64_t>(out.shape(1)) != w.rows || out.shape(0) != x.shape(0)) {
        throw std::invalid_argument("the shapes of input, matrix and output do not fit each other");
    }
    std::vector<int8_t> q(static_cast<size_t>(rows * w.groups * w.grouping.group_size));
    std::vector<float> scale(static_cast<size_t>(rows * w.groups)), sum(scale.size());
    std::vector<uint8_t> scratch(static_cast<size_t>(linear_scratch_bytes(w.cols)));
    for (int64_t row = 0; w.format != WeightFormat::F32 && row < rows; ++row) {
        kernels.quantize(x.data() + row * w.cols, w.cols, w.grouping, q.data() + row * w.groups * w.grouping.group_size,
                         scale.data() + row * w.groups, sum.data() + row * w.groups);
    }
    const ActivationView input{rows, w.cols, w.groups, q.data(), scale.data(), sum.data(), const_cast<float*>(x.data())};
    kernels.linear(w, input, 0, matrix.panels(), {out.data(), w.rows, matrix.bias(), false}, scratch.data());
}

void expand_row(const PackedMatrix& matrix, int64_t row, const Array<float, 1>& out, const std::string& isa) {
    if (row < 0 || row >= matrix.view().rows || static_cast<int64_t>(out.shape(0)) != matrix.view().cols) {
        throw std::invalid_argument("the matrix has no such row, or the output does not have its length");
    }
    kernels_named(isa).dequantize_row(matrix.view(), row, out.data());
}

// Writes q [groups * group size], scale and sum [groups]. For tests.
void quantize(const Floats& x, int64_t group_size, bool is_rotated, const Array<int8_t, 1>& q, const Array<float, 1>& scale,
              const Array<float, 1>& sum, const std::string& isa) {
    const Grouping grouping = checked_grouping(group_size, is_rotated);
    const int64_t n = static_cast<int64_t>(x.shape(0)), groups = (n + group_size - 1) / group_size;
    if (static_cast<int64_t>(q.shape(0)) != groups * group_size || static_cast<int64_t>(scale.shape(0)) != groups ||
        static_cast<int64_t>(sum.shape(0)) != groups) {
        throw std::invalid_argument("the outputs do not fit the number of groups");
    }
    kernels_named(isa).quantize(x.data(), n, grouping, q.data(), scale.data(), sum.data());
}

void rms_norm(const Floats& x, const Floats& weight, float eps, const Array<float, 1>& out, const std::string& isa) {
    if (weight.shape(0) != x.shape(0) || out.shape(0) != x.shape(0)) throw std::invalid_argument("the arrays have different lengths");
    kernels_named(isa).rms_norm(x.data(), weight.data(), eps, static_cast<int64_t>(x.shape(0)), out.data());
}

void silu_mul(const Array<float, 1>& gate, const Floats& up, const std::string& isa) {
    if (gate.shape(0) != up.shape(0)) throw std::invalid_argument("the arrays have different lengths");
    kernels_named(isa).silu_mul(gate.data(), up.data(), static_cast<int64_t>(gate.shape(0)));
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const KernelTable* table : supported_kernels()) names.emplace_back(table->name);
    return names;
}

void bind_matrix(nb::module_& m) {
    nb::list kinds;
    for (const BlockKind& block_kind : kBlockKinds) kinds.append(block_kind.kind);
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
        .def_static("zeros_int8", &zeros_int8, nb::arg("arena"), nb::arg("rows"), nb::arg("cols"), nb::arg("group_size"), nb::arg("is_rotated"))
        .def("round_rows", &round_rows, nb::arg("first"), nb::arg("values"), nb::arg("isa"), nb::arg("threads"))
        .def_static("round_floats", &round_floats, nb::arg("arena"), nb::arg("values"), nb::arg("group_size"), nb::arg("is_rotated"), nb::arg("isa"),
                    nb::arg("threads"))
        .def_static("round_blocks", &round_blocks, nb::arg("arena"), nb::arg("kind"), nb::arg("blocks"), nb::arg("group_size"), nb::arg("is_rotated"),
                    nb::arg("isa"), nb::arg("threads"))
        .def("set_bias", [](PackedMatrix& self, const Floats& bias) { self.set_bias(bias.data(), static_cast<int64_t>(bias.shape(0))); },
             nb::arg("bias"))
        .def("multiply", &multiply, nb::arg("x"), nb::arg("out"), nb::arg("isa"))
        .def("expand_row", &expand_row, nb::arg("row"), nb::arg("out"), nb::arg("isa"))
        .def_prop_ro("rows", [](const PackedMatrix& self) { return self.view().rows; })
        .def_prop_ro("cols", [](const PackedMatrix& self) { return self.view().cols; })
        .def_prop_ro("group_size", [](const PackedMatrix& self) { return self.view().grouping.group_size; })
        .def_prop_ro("format", &format_name)
        .def_prop_ro("nbytes", &PackedMatrix::bytes);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Packed matrices and whole decoder passes on the CPU.";
    m.attr("PAGE_SIZE") = kPageSize;
    m.attr("MIN_TILED_TOKENS") = kMinTiledTokens;
    m.attr("MIN_TILED_BLOCK_TOKENS") = kMinTiledBlockTokens;
    m.def("instruction_sets", &instruction_sets, "Return the instruction sets that this build has and this CPU supports, the fastest first.");
    m.def("quantize", &quantize, nb::arg("x"), nb::arg("group_size"), nb::arg("is_rotated"), nb::arg("q"), nb::arg("scale"),
          nb::arg("sums"), nb::arg("isa"));
    m.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"), nb::arg("isa"));
    m.def("silu_mul", &silu_mul, nb::arg("gate"), nb::arg("up"), nb::arg("isa"));
    bind_matrix(m);
    register_decoder(m);
    register_head(m);
    register_sampler(m);
}
