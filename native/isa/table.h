// The kernels of this translation unit's instruction set as one table.
#pragma once

#include "activations.h"
#include "attention.h"
#include "linear.h"
#include "recurrent.h"

namespace {

constexpr KernelTable make_table(const char* name) {
    return {name, linear, dequantize_row, rms_norm, quantize, turn, silu_mul, gelu_mul, clamped_mul, squash, rotate, store_kv, attention,
            sigmoid_mul, squared_relu, convolve, recur, fold};
}

}  // namespace
