// The table of the kernels, compiled for this translation unit's instruction set.
#pragma once

#include "activations.h"
#include "attention.h"
#include "linear.h"
#include "recurrent.h"

namespace {

constexpr KernelTable make_table(const char* name) {
    return {name, linear, dequantize_row, rms_norm, quantize, silu_mul, gelu_mul, clamped_mul, softcap, rotate, store_kv, attention,
            sigmoid_mul, squared_relu, convolve, recurrent_rows, update_state};
}

}  // namespace
