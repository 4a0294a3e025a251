"""All model families, and functions that find the family of a model."""

from collections.abc import Container, Mapping
from difflib import SequenceMatcher
from typing import Any

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import Architecture
from foreword.models.architectures.attention import DENSE, MIXTURES
from foreword.models.architectures.hybrids import HYBRIDS
from foreword.models.config import Scores

ARCHITECTURES: tuple[Architecture, ...] = (*DENSE, *MIXTURES, *HYBRIDS)

BY_HF_CLASS = {family.hf_class: family for family in ARCHITECTURES}

_VARIANTS = tuple(
    variant for family in ARCHITECTURES for variant in (family, family.without_experts) if variant is not None
)
"""All families, and the variants of families without experts."""

GGUF_NAMES = tuple(dict.fromkeys(family.gguf.architecture for family in _VARIANTS if family.gguf is not None))
"""Supported values of general.architecture in GGUF files."""


def gguf_family_named(
    name: str, scores: Scores | None, settings: Container[str] = frozenset()
) -> Architecture | None:
    """Return the family of a GGUF file by general.architecture and the router's score function (None without experts).

    GGUF gives Mixtral the architecture of Llama, and DeepSeek-V3 that of V2. `settings` are the keys of the metadata,
    which distinguish Granite 4 from Bamba.
    """
    for family in _VARIANTS:
        family_scores = None if family.experts is None else family.experts.scores
        if family.gguf is None or (family.gguf.architecture, family_scores) != (name, scores):
            continue
        if family.gguf.marked_by is None or f"{name}.{family.gguf.marked_by}" in settings:
            return family
    return None


# How unsupported models with recurrent layers are recognised: by the beginning of their class, or by keys.
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
"""Keys of config.json -> the feature that each indicates."""


def text_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text part of a model with images; unchanged `values` for any other model."""
    named, text = values.get("architectures"), values.get("text_config")
    text_class = {
        family.with_images: family.hf_class for family in BY_HF_CLASS.values() if family.with_images
    }
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    if not isinstance(name, str) or name not in text_class or not isinstance(text, dict):
        return values
    settings = {key: value for key, value in values.items() if not key.endswith("_config")} | text
    settings["architectures"] = [text_class[name]]
    settings["quantization_config"] = values.get("quantization_config")
    return settings


def family_named(values: Mapping[str, Any], origin: str) -> Architecture:
    """Return the family of a config.json; raise `CheckpointError`, which names a similar family, if unsupported."""
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
        BY_HF_CLASS, key=lambda hf_class: SequenceMatcher(None, _stem(name[:60]), _stem(hf_class)).ratio()
    )
    raise CheckpointError(
        f"{origin}: architecture {name[:60]} is not supported; the nearest supported one is {nearest}"
        f"{_differing(values, BY_HF_CLASS[nearest])}; `foreword models --supported` lists all"
    )


def _stem(name: str) -> str:
    return name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration").lower()


def _is_recurrent(name: str, values: Mapping[str, Any]) -> bool:
    kinds = values.get("layer_types")
    recurrent_kinds = ("linear_attention", "mamba", "recurrent", "conv")
    if isinstance(kinds, list) and any(kind in recurrent_kinds for kind in kinds):
        return True
    return name.lower().startswith(_RECURRENT) or any(values.get(key) is not None for key in _RECURRENT_KEYS)


def _differing(values: Mapping[str, Any], nearest: Architecture) -> str:
    """Return the end of the error message: which features of the model the nearest family lacks."""
    has_feature = {
        "kv_lora_rank": nearest.is_latent,
        "attn_logit_softcapping": nearest.scales.attention_cap is not None,
        "sliding_window": nearest.window is not None,
    } | dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), nearest.experts is not None)
    missing = [
        feature
        for key, feature in _DIFFERENCES.items()
        if values.get(key) and not has_feature.get(key, False)
    ]
    return f", which lacks {' and '.join(dict.fromkeys(missing))}" if missing else ", whose layers may differ"
