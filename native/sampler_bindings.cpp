#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "sampler.h"

namespace nb = nanobind;

namespace foreword {
namespace {

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;  // rows may be longer than the vocabulary
template <typename T>
using Column = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void floors(
    Rows logits, Column<const double> temperature, Column<const int64_t> top_k, Column<const double> top_p,
    Column<const double> min_p, Column<float> peak, Column<float> floor, Column<int64_t> first
) {
    const int64_t rows = logits.shape(0), vocab = logits.shape(1), stride = logits.stride(0);
    nb::gil_scoped_release release;
    SamplerScratch scratch;
    for (int64_t r = 0; r < rows; ++r) {
        const RowShape shape{temperature(r), top_k(r), top_p(r), min_p(r)};
        const RowFloor found = row_floor(logits.data() + r * stride, vocab, shape, scratch);
        peak(r) = found.peak;
        floor(r) = found.floor;
        first(r) = found.first;
    }
}

void draw(
    Rows logits, Column<const float> peak, Column<const float> floor, Column<const double> temperature,
    Column<const int64_t> only, Column<const int64_t> keys, Column<int64_t> tokens
) {
    const int64_t rows = logits.shape(0), vocab = logits.shape(1), stride = logits.stride(0);
    nb::gil_scoped_release release;
    for (int64_t r = 0; r < rows; ++r) {
        const RowDraw wanted{peak(r), floor(r), temperature(r), only(r), static_cast<uint64_t>(keys(r))};
        tokens(r) = row_draw(logits.data() + r * stride, vocab, wanted);
    }
}

}  // namespace

void register_sampler(nb::module_& module) {
    module.def("sampler_floors", &floors);
    module.def("sampler_draw", &draw);
}

}  // namespace foreword
