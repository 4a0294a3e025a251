"""Element-wise functions shared by several kernels."""

import triton
import triton.language as tl


@triton.jit
def tanh(x) -> tl.tensor:
    """Return tanh of float32 numbers; large ones saturate at 1 and -1."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Return silu, gelu in its tanh form, or squared ReLU of float32 numbers; the names are those of `MlpSpec`."""
    if ACTIVATION == "gelu_pytorch_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    if ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    return x / (1.0 + tl.exp(-x))
