// Types and checks that all Python bindings use.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

namespace foreword {

namespace nb = nanobind;

template <typename T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
using Floats = Array<const float, 1>;

inline int checked_threads(int threads) {
    if (threads < 1) throw std::invalid_argument("the number of threads must be at least 1");
    return threads;
}

void register_decoder(nb::module_& m);
void register_head(nb::module_& m);

}  // namespace foreword
