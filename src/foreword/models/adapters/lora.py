"""Low-rank additions to the matrices of a decoder."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from foreword.models.config import LayerSpec, ModelConfig

MAX_RANK = 128

MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The matrices of a layer that can be added to, in the order in which the kernels know them."""


@dataclass(frozen=True)
class Factors:
    """What is added to one matrix: y += up (down x)."""

    down: Tensor  # float32 [rank, inputs], PEFT's A
    up: Tensor  # float32 [outputs, rank], PEFT's B, scaled

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True)
class Lora:
    """An adapter; the same whatever file it came from."""

    factors: Mapping[tuple[int, str], Factors] = field(repr=False)  # by layer and module

    @property
    def rank(self) -> int:
        """Of the largest factor."""
        return max((factor.rank for factor in self.factors.values()), default=0)


def module_shape(layer: LayerSpec, module: str, hidden: int) -> tuple[int, int]:
    """(outputs, inputs) of one of `MODULES`."""
    attention, inner = layer.attention, layer.mlp.intermediate_size
    return {
        "self_attn.q_proj": (attention.query_width, hidden),
        "self_attn.k_proj": (attention.kv_width, hidden),
        "self_attn.v_proj": (attention.kv_width, hidden),
        "self_attn.o_proj": (hidden, attention.query_width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }[module]


def layer_modules(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Of one layer: module -> (outputs, inputs)."""
    return {module: module_shape(config.layers[layer], module, config.hidden_size) for module in MODULES}
