"""The two parts of a decoder layer, before and after its attention, for frozen and for trainable weights."""

from collections.abc import Callable, Mapping
from typing import ParamSpec, Protocol, TypeVar

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


class LayerFunctions(Protocol):
    """The two functions of a trained layer, with the arguments of `before_attention` and `after_attention`."""

    def before(
        self, stream: Tensor, cos: Tensor, sin: Tensor, tensors: LayerTensors, sizes: Sizes, eps: float, /
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def after(self, stream: Tensor, attended: Tensor, tensors: LayerTensors, eps: float, /) -> Tensor: ...


class LayerHalves:
    """The two functions of a usual layer."""

    def __init__(self, *, compiled: bool) -> None:
        self.before = compiled_for_training(before_attention, compiled)
        self.after = compiled_for_training(after_attention, compiled)


def before_attention(
    stream: Tensor, cos: Tensor, sin: Tensor, tensors: LayerTensors, sizes: Sizes, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, both rotated, and values: [rows, heads, dim]."""
    return project_heads(rms_norm(stream, _present(tensors[0]), eps), cos, sin, tensors, sizes, eps)


def project_heads(
    normed: Tensor, cos: Tensor, sin: Tensor, tensors: LayerTensors, sizes: Sizes, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of the attention's input."""
    qkv, qkv_bias, query_norm, key_norm = tensors[1:5]
    heads, kv_heads, dim = sizes
    joined = linear(normed, _present(qkv), qkv_bias)
    q, k, v = torch.split(joined.view(normed.shape[0], -1, dim), [heads, kv_heads, kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        q = rms_norm(q, query_norm, eps)
        k = rms_norm(k, key_norm, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def after_attention(stream: Tensor, attended: Tensor, tensors: LayerTensors, eps: float) -> Tensor:
    """Return the residual stream after the layer; `attended` is the output of its attention."""
    stream = stream + attention_output(attended, tensors)
    return stream + mlp_output(rms_norm(stream, _present(tensors[7]), eps), tensors)


def attention_output(attended: Tensor, tensors: LayerTensors) -> Tensor:
    """Return what a layer's attention adds to the residual stream."""
    output, output_bias = tensors[5:7]
    return linear(attended.flatten(1), _present(output), output_bias)


def mlp_output(normed: Tensor, tensors: LayerTensors) -> Tensor:
    """Return what a layer's MLP adds to the residual stream, given its input."""
    gate_up, gate_up_bias, down, down_bias = tensors[8:]
    gate, up = linear(normed, _present(gate_up), gate_up_bias).chunk(2, dim=-1)
    return linear(silu(gate) * up, _present(down), down_bias)


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
