"""Element-wise functions shared by several kernels."""

import triton
import triton.language as tl


@triton.jit
def tanh(x) -> tl.tensor:
    """Return tanh of float32 numbers; large ones saturate at 1 and -1."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def activated(gate, GELU: tl.constexpr) -> tl.tensor:
    """Return silu, or gelu in its tanh form, of float32 numbers."""
    if GELU:
        return 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    return gate / (1.0 + tl.exp(-gate))
