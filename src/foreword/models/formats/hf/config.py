"""config.json of a Hugging Face model as a ModelConfig."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreword.models.architectures.architecture import Architecture
from foreword.models.config import ModelConfig, NormSpec
from foreword.models.formats.families import family_named
from foreword.models.formats.fields import ConfigFields, check_experts, check_layers
from foreword.models.formats.hf.layers import attention_spec, layer_specs, optional_number
from foreword.models.formats.hf.rope import extended_context, rope_spec

LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def hf_family(values: Mapping[str, Any], path: Path) -> Architecture:
    """The family that config.json names."""
    family = family_named(values, str(path))
    if family.rope.interleaved and not ConfigFields(values, str(path)).flag("rope_interleave", True):
        return replace(family, rope=replace(family.rope, interleaved=False))
    return family


def hf_config(values: Mapping[str, Any], names: frozenset[str], path: Path) -> ModelConfig:
    """The config that config.json describes; `names` are the tensors that the files hold."""
    fields = ConfigFields(values, str(path))
    family = hf_family(values, path)
    num_layers = check_layers(names, LAYER, fields.count("num_hidden_layers"), fields.origin)
    attention = attention_spec(fields, family)
    rope = rope_spec(fields, family.rope, attention.turned)
    layers = layer_specs(fields, family, num_layers)
    check_experts(names, layers, fields.origin)
    return ModelConfig(
        architecture=family.name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        context_length=extended_context(fields.count("max_position_embeddings"), rope),
        layers=layers,
        norm=NormSpec(fields.number("rms_norm_eps")),
        rope=rope,
        tied_embeddings=fields.flag("tie_word_embeddings", "lm_head.weight" not in names),
        embedding_scale=_embedding_scale(fields, family),
        logit_scale=1 / (optional_number(fields, family.scales.logits_divisor) or 1.0),
        logit_softcap=optional_number(fields, family.scales.logits_cap),
    )


def _embedding_scale(fields: ConfigFields, family: Architecture) -> float:
    if family.scales.embedding_by_width:
        return math.sqrt(fields.count("hidden_size"))
    return optional_number(fields, family.scales.embedding) or 1.0
