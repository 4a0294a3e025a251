"""The form in which a family is declared."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class Switch:
    """Something that a family has never, always, or where its config.json says so."""

    always: bool = False
    key: str | None = None  # a true-or-false key of config.json; false where it is missing


class Window(Enum):
    """What a family's config.json says about sliding windows."""

    NONE = auto()  # it has none
    ALL_LAYERS = auto()  # `sliding_window` holds for every layer
    SOME_LAYERS = auto()  # with `use_sliding_window`, for some


@dataclass(frozen=True)
class GgufNames:
    """How GGUF spells a family, and which of its tensors Hugging Face knows under which name."""

    architecture: str  # general.architecture, and the prefix of its keys
    interleaved: bool  # rotated pairs stand side by side in rows of q and k, not half a head apart
    layer_tensors: Mapping[str, str]  # blk.N.<key> -> model.layers.N.<value>


@dataclass(frozen=True)
class Architecture:
    """What differs between families; all that is not here is the same for all of them."""

    name: str
    hf_class: str  # the one entry of `architectures` in config.json; never imported or run
    gguf: GgufNames | None = None  # None: GGUF files call it by another family's name
    attention_bias: Switch = Switch()  # of the q, k and v projections
    output_bias: Switch = Switch()  # of the attention's output projection
    mlp_bias: Switch = Switch()
    qk_norm: bool = False
    window: Window = Window.NONE
    kv_heads_may_be_missing: bool = False  # num_key_value_heads; then there are as many as query heads


TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""GGUF's names outside the layers."""

LLAMA_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names inside a layer of the llama kind."""

QK_NORM_TENSORS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
