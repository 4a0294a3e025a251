"""All families, and the family of a model's file."""

from collections.abc import Container, Mapping
from difflib import SequenceMatcher
from typing import Any

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import Architecture
from foreword.models.architectures.dense import DENSE
from foreword.models.architectures.hybrids import HYBRIDS
from foreword.models.architectures.mixtures import MIXTURES
from foreword.models.config import Scores

ARCHITECTURES: tuple[Architecture, ...] = (*DENSE, *MIXTURES, *HYBRIDS)

BY_HF_CLASS = {family.hf_class: family for family in ARCHITECTURES}

_FORMS = tuple(
    form for family in ARCHITECTURES for form in (family, family.without_experts) if form is not None
)

GGUF_NAMES = tuple(dict.fromkeys(family.gguf.architecture for family in _FORMS if family.gguf is not None))


def gguf_family_named(
    name: str, scores: Scores | None, settings: Container[str] = frozenset()
) -> Architecture | None:
    """Return the family by general.architecture and the router's score function (None without experts).

    Mixtral is a llama with experts, and DeepSeek-V3 a V2 with another score function. `settings` are the keys of the
    metadata, which tell Granite 4 from Bamba.
    """
    for family in _FORMS:
        own = None if family.experts is None else family.experts.scores
        if family.gguf is None or (family.gguf.architecture, own) != (name, scores):
            continue
        if family.gguf.marked_by is None or f"{name}.{family.gguf.marked_by}" in settings:
            return family
    return None


_RECURRENT = ("mamba", "rwkv", "jamba", "falconh1", "lfm2moe", "kimilinear")
_RECURRENT_KEYS = ("linear_num_key_heads", "mamba_d_state", "ssm_cfg", "mamba_d_conv", "conv_L_cache")

_DIFFERENCES = {
    "vision_config": "images",
    "audio_config": "sound",
    "encoder_layers": "an encoder",
    "index_topk": "sparse attention (an indexer)",
    "parallel_attn": "attention and MLP side by side",
    "attn_logit_softcapping": "soft caps",
    "kv_lora_rank": "latent attention",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "sliding_window": "a sliding window",
}
"""Keys of config.json, and the feature that they indicate."""


def text_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model's text part, if its images can be left out; otherwise all of them."""
    named, text = values.get("architectures"), values.get("text_config")
    known = {family.with_images: family.hf_class for family in BY_HF_CLASS.values() if family.with_images}
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    if not isinstance(name, str) or name not in known or not isinstance(text, dict):
        return values
    return (
        {key: value for key, value in values.items() if not key.endswith("_config")}
        | text
        | {
            "architectures": [known[name]],
            "quantization_config": values.get("quantization_config"),
        }
    )


def family_named(values: Mapping[str, Any], origin: str) -> Architecture:
    """Return the family; raise an error with the nearest supported one and its differences."""
    named = values.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    if isinstance(name, str) and name in BY_HF_CLASS:
        return BY_HF_CLASS[name]
    if not isinstance(name, str):
        raise CheckpointError(
            f"{origin}: architectures is {str(named)[:60]}, not the name of one class; "
            f"the nearest supported one is LlamaForCausalLM"
        )
    if _is_recurrent(name, values):
        raise CheckpointError(
            f"{origin}: {name[:60]} has recurrent layers of a family that is not supported; use another model, "
            "`foreword models --supported` lists all"
        )
    nearest = max(
        BY_HF_CLASS, key=lambda known: SequenceMatcher(None, _stem(name[:60]), _stem(known)).ratio()
    )
    raise CheckpointError(
        f"{origin}: architecture {name[:60]} is not supported; the nearest that is, is {nearest}"
        f"{_differing(values, BY_HF_CLASS[nearest])}; `foreword models --supported` lists all"
    )


def _stem(name: str) -> str:
    return name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration").lower()


def _is_recurrent(name: str, values: Mapping[str, Any]) -> bool:
    kinds = values.get("layer_types")
    listed = isinstance(kinds, list) and any(
        kind in ("linear_attention", "mamba", "recurrent", "conv") for kind in kinds if isinstance(kind, str)
    )
    return (
        listed
        or name.lower().startswith(_RECURRENT)
        or any(values.get(key) is not None for key in _RECURRENT_KEYS)
    )


def _differing(values: Mapping[str, Any], nearest: Architecture) -> str:
    """Return features of the model that the nearest family does not have."""
    known = {
        "kv_lora_rank": nearest.is_latent,
        "attn_logit_softcapping": nearest.scales.attention_cap is not None,
        "sliding_window": nearest.window is not None,
    } | dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), nearest.experts is not None)
    found = [what for key, what in _DIFFERENCES.items() if values.get(key) and not known.get(key, False)]
    return f", which lacks {' and '.join(dict.fromkeys(found))}" if found else ", whose layers may differ"
