"""The two parts of a decoder layer, before and after its attention, for frozen and for trainable weights."""

from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from foreword.backends.torch.norms import rms_norm
from foreword.models.rope import rotate

LayerTensors = tuple[Tensor | None, ...]
"""The tensors of a layer in the order of `layer_tensors`. With a tuple, one compiled function serves all layers."""

Sizes = tuple[int, int, int]  # heads, KV heads, head size

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled_for_training(function: Callable[_P, _R], compiled: bool) -> Callable[_P, _R]:
    """Return the function; if `compiled`, calls with gradients are compiled.

    Calls without gradients (evaluation) are not, since they would have to be compiled again, which takes too long.
    """
    fast = torch.compile(function, dynamic=False) if compiled else function

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return (fast if torch.is_grad_enabled() else function)(*args, **kwargs)

    return call


def before_attention(
    stream: Tensor, cos: Tensor, sin: Tensor, tensors: LayerTensors, sizes: Sizes, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, both rotated, and values: [rows, heads, dim]."""
    input_norm, qkv, qkv_bias, query_norm, key_norm = tensors[:5]
    heads, kv_heads, dim = sizes
    joined = linear(rms_norm(stream, _present(input_norm), eps), _present(qkv), qkv_bias)
    q, k, v = torch.split(joined.view(stream.shape[0], -1, dim), [heads, kv_heads, kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        q = rms_norm(q, query_norm, eps)
        k = rms_norm(k, key_norm, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def after_attention(stream: Tensor, attended: Tensor, tensors: LayerTensors, eps: float) -> Tensor:
    """Return the residual stream after the layer; `attended` is the output of its attention."""
    output, output_bias, mlp_norm, gate_up, gate_up_bias, down, down_bias = tensors[5:]
    stream = stream + linear(attended.flatten(1), _present(output), output_bias)
    normed = rms_norm(stream, _present(mlp_norm), eps)
    gate, up = linear(normed, _present(gate_up), gate_up_bias).chunk(2, dim=-1)
    return stream + linear(silu(gate) * up, _present(down), down_bias)


def layer_tensors(weights: Mapping[str, Tensor], prefix: str) -> LayerTensors:
    """Return a layer's tensors; `weights` has Hugging Face names, which start with `prefix`."""

    def joined(kind: str, *names: str) -> Tensor | None:
        parts = [weights[name] for part in names if (name := f"{prefix}{part}.{kind}") in weights]
        return torch.cat(parts) if parts else None

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return (
        weights.get(f"{prefix}input_layernorm.weight"),
        joined("weight", *qkv),
        joined("bias", *qkv),
        weights.get(f"{prefix}self_attn.q_norm.weight"),
        weights.get(f"{prefix}self_attn.k_norm.weight"),
        weights.get(f"{prefix}self_attn.o_proj.weight"),
        weights.get(f"{prefix}self_attn.o_proj.bias"),
        weights.get(f"{prefix}post_attention_layernorm.weight"),
        joined("weight", *gate_up),
        joined("bias", *gate_up),
        weights.get(f"{prefix}mlp.down_proj.weight"),
        weights.get(f"{prefix}mlp.down_proj.bias"),
    )


def tracked(stream: Tensor) -> Tensor:
    """Return the stream, marked as requiring a gradient: then all layers use the same compiled code."""
    is_tracked = stream.requires_grad or not torch.is_grad_enabled()
    return stream if is_tracked else stream.detach().requires_grad_()


def rotation_of(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [rows, dim / 2] for these positions."""
    angles = positions.unsqueeze(1).float() * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
