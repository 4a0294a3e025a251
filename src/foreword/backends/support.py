"""Checks a model's config before its weights are read, and lists the supported model families."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import Architecture
from foreword.models.architectures.registry import ARCHITECTURES
from foreword.models.config import AttentionSpec, LayerSpec, ModelConfig, Norms


class Feature(Enum):
    """A feature beyond plain llama layers, with its name for users."""

    WINDOW = "sliding-window attention"
    EXPERTS = "mixture of experts"
    LATENT = "latent attention"
    GATED = "gated attention"
    SOFT_CAPS = "soft caps of scores or logits"
    NORMS = "norms after attention and MLP"
    WIDE_NORM = "query and key norms over all heads"
    SCALES = "scaled embeddings, residuals, scores or logits"
    NO_ROPE = "layers without rotary embedding"
    LAYER_ROPE = "rotary frequencies per layer"
    PARTIAL_ROPE = "partial rotary embedding"
    ROPE_MAGNITUDE = "rotary embedding with an attention factor"
    GELU = "GeGLU"
    SINKS = "attention sinks"
    CLAMPED = "experts with biases and clamped activations"
    RECURRENT = "recurrent layers"
    RELU2 = "MLPs of squared ReLU without a gate"
    MIXED = "layers of different kinds"


ACTIVATIONS = {"silu": None, "gelu_pytorch_tanh": Feature.GELU, "relu2": Feature.RELU2}
"""Activations that every backend has, and the feature that each needs, if any."""


def require_supported(config: ModelConfig) -> LayerSpec:
    """Return the model's first layer; raise `CheckpointError` for a model that no backend runs."""
    if not config.layers:
        raise CheckpointError(f"the {config.architecture} model has no layers; use another")
    unknown = [f"{config.norm.kind} norms"] if config.norm.kind != "rms" else []
    activations = {layer.mlp.activation for layer in config.layers} - set(ACTIVATIONS)
    unknown += [f"activation {name!r}" for name in sorted(activations)]
    if unknown:
        raise CheckpointError(
            f"no backend supports this {config.architecture} model's {', '.join(unknown)}; use another model"
        )
    return config.layers[0]


def is_plain(config: ModelConfig) -> bool:
    """Return whether all layers are plain Llama layers."""
    return not features_of(config)


def require_plain(config: ModelConfig) -> LayerSpec:
    """Return the spec of all layers; raise `CheckpointError` unless they are equal plain Llama layers."""
    first, features = require_supported(config), features_of(config)
    if len(features) > 1:
        features.discard(Feature.MIXED)  # the others already say what differs
    if features:
        names = ", ".join(feature.value for feature in Feature if feature in features)
        raise CheckpointError(
            f"training drafters from a model's own layers does not support this {config.architecture} model's {names}; "
            "train eagle3, dflash or medusa heads"
        )
    return first


def features_of(config: ModelConfig) -> set[Feature]:
    """Return the features of a model beyond plain llama layers."""
    features = {
        feature for layer in dict.fromkeys(config.layers) for feature in _layer_features(layer, config)
    }
    if config.embedding_scale != 1 or config.logit_scale != 1:
        features.add(Feature.SCALES)
    if config.logit_softcap is not None:
        features.add(Feature.SOFT_CAPS)
    if any(layer != config.layers[0] for layer in config.layers):
        features.add(Feature.MIXED)
    return features


def _layer_features(layer: LayerSpec, config: ModelConfig) -> Iterator[Feature]:
    if layer.has_attention:
        yield from _attention_features(layer.attention, config)
    if layer.recurrent is not None:
        yield Feature.RECURRENT
    if (experts := layer.mlp.experts) is not None:
        yield Feature.EXPERTS
        if experts.bias or experts.clamp is not None:
            yield Feature.CLAMPED
    if layer.norms is not Norms.BEFORE:
        yield Feature.NORMS
    if layer.residual_scale != 1:
        yield Feature.SCALES
    if (feature := ACTIVATIONS.get(layer.mlp.activation)) is not None:
        yield feature


def _attention_features(attention: AttentionSpec, config: ModelConfig) -> Iterator[Feature]:
    rope = attention.rope or config.rope
    has = {
        Feature.WINDOW: attention.window is not None and attention.window < config.context_length,
        Feature.LATENT: attention.latent is not None,
        Feature.SOFT_CAPS: attention.softcap is not None,
        Feature.WIDE_NORM: attention.qk_norm and attention.wide_qk_norm,
        Feature.SCALES: attention.scale is not None,
        Feature.GATED: attention.gated,
        Feature.SINKS: attention.sinks,
        Feature.NO_ROPE: not attention.is_rotated,
        Feature.LAYER_ROPE: attention.rope is not None,
        Feature.PARTIAL_ROPE: rope.rotary_dim is not None,
        Feature.ROPE_MAGNITUDE: rope.magnitude != 1,
    }
    yield from (feature for feature, applies in has.items() if applies)


BACKENDS = ("cpu", "cuda", "torch")
"""Columns of the table of model families and backends in docs/models.md."""


@dataclass(frozen=True)
class SupportedFamily:
    """One row of the table of model families and backends."""

    models: str  # names of the models, for users
    hf_class: str  # in config.json
    formats: str  # of files
    backends: dict[str, str]  # "yes" for each: a family is added to all backends


def supported_families() -> list[SupportedFamily]:
    """Return all rows, as in `foreword models --supported`."""
    return [
        SupportedFamily(
            family.models,
            family.hf_class,
            _formats(family),
            dict.fromkeys(BACKENDS, "yes"),
        )
        for family in ARCHITECTURES
    ]


def _formats(family: Architecture) -> str:
    """Return the file formats of a family, with its architecture names in GGUF files."""
    # GGUF names the variants of a family with and without experts differently.
    variants = [variant for variant in (family.without_experts, family) if variant is not None]
    names = [
        variant.gguf_alias if variant.gguf is None else variant.gguf.architecture for variant in variants
    ]
    gguf_names = dict.fromkeys(name for name in names if name is not None)
    return f"safetensors, GGUF ({', '.join(gguf_names)})" if gguf_names else "safetensors"
