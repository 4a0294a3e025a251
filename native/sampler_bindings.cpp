// Python bindings of the sampler.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "bindings.h"
#include "sampler.h"

namespace foreword {
namespace {

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;  // rows may be longer than the vocabulary
template <typename T>
using Field = nb::ndarray<const T, nb::ndim<1>, nb::device::cpu>;  // may be a column of records
template <typename T>
using Column = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Returns the number of rows; throws unless the logits of each row are contiguous and every other array has an entry per row.
template <typename... Arrays>
int64_t checked_rows(const Rows& logits, const Arrays&... arrays) {
    if (logits.shape(1) < 1) throw std::invalid_argument("the logits have no columns");
    if (logits.shape(1) > 1 && logits.stride(1) != 1) throw std::invalid_argument("the logits of a row are not contiguous");
    if (((arrays.shape(0) != logits.shape(0)) || ...)) throw std::invalid_argument("the arrays do not fit the rows of logits");
    return static_cast<int64_t>(logits.shape(0));
}

std::vector<RowParams> read_params(
    int64_t rows, const Field<double>& temperature, const Field<int64_t>& top_k, const Field<double>& top_p,
    const Field<double>& min_p
) {
    std::vector<RowParams> params;
    for (int64_t r = 0; r < rows; ++r) params.push_back(checked_params(temperature(r), top_k(r), top_p(r), min_p(r)));
    return params;
}

void compute_floors(
    Sampler& sampler, Rows logits, Field<double> temperature, Field<int64_t> top_k, Field<double> top_p,
    Field<double> min_p, Column<float> peak, Column<float> floor, Column<int64_t> greedy_token
) {
    const int64_t rows = checked_rows(logits, temperature, top_k, top_p, min_p, peak, floor, greedy_token);
    const std::vector<RowParams> params = read_params(rows, temperature, top_k, top_p, min_p);
    std::vector<RowFloor> floors(params.size());
    {
        nb::gil_scoped_release release;
        sampler.floors(logits.data(), rows, logits.stride(0), static_cast<int64_t>(logits.shape(1)), params.data(), floors.data());
    }
    for (int64_t r = 0; r < rows; ++r) {
        peak(r) = floors[r].peak;
        floor(r) = floors[r].floor;
        greedy_token(r) = floors[r].greedy_token;
    }
}

void draw(
    Sampler& sampler, Rows logits, Column<const float> peak, Column<const float> floor,
    Column<const double> temperature, Column<const int64_t> greedy_token, Column<const int64_t> keys, Column<int64_t> tokens
) {
    const int64_t rows = checked_rows(logits, peak, floor, temperature, greedy_token, keys, tokens);
    std::vector<RowDraw> draws;
    for (int64_t r = 0; r < rows; ++r) {
        draws.push_back({peak(r), floor(r), temperature(r), greedy_token(r), static_cast<uint64_t>(keys(r))});
    }
    nb::gil_scoped_release release;
    sampler.draw(logits.data(), rows, logits.stride(0), static_cast<int64_t>(logits.shape(1)), draws.data(), tokens.data());
}

using DraftedArrays = std::pair<std::vector<int64_t>, std::vector<int64_t>>;  // parents, tokens of DraftedRows

DraftedRows read_drafted(const DraftedArrays& arrays, int64_t rows) {
    const auto& [parents, tokens] = arrays;
    if (static_cast<int64_t>(parents.size()) != rows || static_cast<int64_t>(tokens.size()) != rows) {
        throw std::invalid_argument("the draft tokens do not fit the rows");
    }
    for (int64_t row = 0; row < rows; ++row) {
        if (parents[static_cast<size_t>(row)] >= row || parents[static_cast<size_t>(row)] < -1) {
            throw std::invalid_argument("a draft token must follow an earlier row, or -1");
        }
    }
    return {parents.data(), tokens.data()};
}

void sample(
    Sampler& sampler, Rows logits, Field<double> temperature, Field<int64_t> top_k, Field<double> top_p,
    Field<double> min_p, Field<uint64_t> stems, Field<int64_t> positions, Column<int64_t> tokens, Column<int64_t> status,
    const std::optional<DraftedArrays>& drafted_arrays
) {
    const int64_t rows = checked_rows(logits, temperature, top_k, top_p, min_p, stems, positions, tokens, status);
    const std::optional<DraftedRows> drafted = drafted_arrays ? std::optional(read_drafted(*drafted_arrays, rows)) : std::nullopt;
    const std::vector<RowParams> params = read_params(rows, temperature, top_k, top_p, min_p);
    std::vector<uint64_t> keys(params.size());
    for (int64_t r = 0; r < rows; ++r) keys[r] = row_key(stems(r), positions(r));
    std::vector<RowToken> results(params.size());
    {
        nb::gil_scoped_release release;
        sampler.sample(
            logits.data(), rows, logits.stride(0), static_cast<int64_t>(logits.shape(1)), params.data(), keys.data(),
            drafted ? &*drafted : nullptr, results.data()
        );
    }
    for (int64_t r = 0; r < rows; ++r) {
        tokens(r) = results[r].token;
        status(r) = static_cast<int64_t>(results[r].status);
    }
}

}  // namespace

void register_sampler(nb::module_& module) {
    nb::class_<Sampler>(module, "Sampler")
        .def("__init__", [](Sampler* self, int threads) { new (self) Sampler(checked_threads(threads)); }, nb::arg("threads"))
        .def("floors", &compute_floors)
        .def("draw", &draw)
        .def("sample", &sample, nb::arg("logits"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"),
             nb::arg("stems"), nb::arg("positions"), nb::arg("tokens"), nb::arg("status"), nb::arg("drafted").none());
}

}  // namespace foreword
