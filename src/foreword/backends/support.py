"""Model features that each backend supports: checks before weights are read, and a table of model families."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import Architecture, DenseLayers, WindowedLayers
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


SUPPORTED: dict[str, frozenset[Feature]] = {
    "torch": frozenset(Feature),
    "cpu": frozenset(Feature),
    "cuda": frozenset(Feature) - {Feature.RELU2},
    "training": frozenset(),
}
"""Supported features by backend; `training` means the trainer's own passes."""

ACTIVATIONS = {"silu": None, "gelu_pytorch_tanh": Feature.GELU, "relu2": Feature.RELU2}
"""Activations that some backend supports, and the feature that each needs, if any."""


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


def missing_features(config: ModelConfig, backend: str) -> list[str]:
    """Return the names of a model's features that a backend does not support."""
    unknown = [f"{config.norm.kind} norms"] if config.norm.kind != "rms" else []
    activations = {layer.mlp.activation for layer in config.layers} - set(ACTIVATIONS)
    unknown += [f"activation {name!r}" for name in sorted(activations)]
    missing = features_of(config) - SUPPORTED[backend]
    if len(missing) > 1:
        missing.discard(Feature.MIXED)  # the others already say what differs
    return [*unknown, *(feature.value for feature in Feature if feature in missing)]


def require_supported(config: ModelConfig, backend: str) -> LayerSpec:
    """Raise `CheckpointError` if the backend does not support a feature; return the model's first layer."""
    if not config.layers:
        raise CheckpointError(f"the {config.architecture} model has no layers; use another")
    if features := missing_features(config, backend):
        where = "training" if backend == "training" else f"the {backend} backend"
        has_alternative = backend in ("cpu", "cuda") and not missing_features(config, "torch")
        raise CheckpointError(
            f"{where} does not support this {config.architecture} model's {', '.join(features)}; "
            f"use {'--backend torch' if has_alternative else 'another model'}"
        )
    return config.layers[0]


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
    backends: dict[str, str]  # by backend, "yes" or "no: FEATURES"


def supported_families() -> list[SupportedFamily]:
    """Return all rows, as in `foreword models --supported`."""
    return [
        SupportedFamily(
            family.models,
            family.hf_class,
            _formats(family),
            {backend: _support(family, backend) for backend in BACKENDS},
        )
        for family in ARCHITECTURES
    ]


def supported_markdown() -> str:
    """Return the table of families in Markdown, for docs/models.md."""
    headings = ("models", "class in config.json", "files", *BACKENDS)
    lines = [headings, ("---",) * len(headings)]
    for row in supported_families():
        lines.append((row.models, f"`{row.hf_class}`", row.formats, *row.backends.values()))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _formats(family: Architecture) -> str:
    """Return the file formats of a family, with its architecture names in GGUF files."""
    # GGUF names the variants of a family with and without experts differently.
    variants = [variant for variant in (family.without_experts, family) if variant is not None]
    names = [
        variant.gguf_alias if variant.gguf is None else variant.gguf.architecture for variant in variants
    ]
    known = dict.fromkeys(name for name in names if name is not None)
    return f"safetensors, GGUF ({', '.join(known)})" if known else "safetensors"


def _support(family: Architecture, backend: str) -> str:
    """Return "yes", or "no: " and the features of a family that a backend does not support."""
    unsupported = _features_of_family(family) - SUPPORTED[backend]
    if len(unsupported) > 1:
        unsupported.discard(Feature.MIXED)
    if not unsupported:
        return "yes"
    return "no: " + ", ".join(feature.value for feature in Feature if feature in unsupported)


def _features_of_family(family: Architecture) -> set[Feature]:
    """Return the features that all models of a family have."""
    scales, rope, experts, window = family.scales, family.rope, family.experts, family.window
    has = {
        Feature.EXPERTS: experts is not None,
        Feature.CLAMPED: experts is not None and (experts.bias or experts.clamp is not None),
        Feature.LATENT: family.is_latent,
        Feature.SINKS: family.has_sinks,
        Feature.GATED: family.has_gated_attention,
        Feature.RECURRENT: family.recurrent is not None,
        Feature.SOFT_CAPS: scales.attention_cap is not None,
        Feature.NORMS: family.norms is not Norms.BEFORE,
        Feature.WIDE_NORM: family.wide_qk_norm,
        Feature.SCALES: scales.embedding_by_width or scales.attention is not None,
        Feature.NO_ROPE: rope.unrotated_every is not None,
        Feature.LAYER_ROPE: rope.local_theta is not None,
        Feature.PARTIAL_ROPE: rope.partial != 1,
        Feature.GELU: family.activation.startswith("gelu"),
        Feature.RELU2: family.activation == "relu2",
        Feature.WINDOW: window is not None and window.layers is WindowedLayers.ALL_BUT_EVERY_NTH,
        Feature.MIXED: experts is not None and experts.dense is DenseLayers.FIRST,
    }
    return {feature for feature, applies in has.items() if applies}
