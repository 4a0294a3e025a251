"""Model features that each backend supports: checked before weights are read, and a table of model families."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import Architecture, DenseLayers, WindowedLayers
from foreword.models.architectures.registry import ARCHITECTURES
from foreword.models.config import AttentionSpec, LayerSpec, ModelConfig, Norms


class Part(Enum):
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


SUPPORTED: dict[str, frozenset[Part]] = {
    "torch": frozenset(Part),
    "cpu": frozenset(Part) - {Part.LATENT},
    "cuda": frozenset(Part) - {Part.RELU2},
    "training": frozenset(),
}
"""Supported features by backend; `training` means the trainer's own passes."""

ACTIVATIONS = {"silu": None, "gelu_pytorch_tanh": Part.GELU, "relu2": Part.RELU2}
"""Activations that some backend supports."""


def parts_of(config: ModelConfig) -> set[Part]:
    found = {part for layer in dict.fromkeys(config.layers) for part in _layer_parts(layer, config)}
    if config.embedding_scale != 1 or config.logit_scale != 1:
        found.add(Part.SCALES)
    if config.logit_softcap is not None:
        found.add(Part.SOFT_CAPS)
    if any(layer != config.layers[0] for layer in config.layers):
        found.add(Part.MIXED)
    return found


def missing_parts(config: ModelConfig, backend: str) -> list[str]:
    unknown = [f"{config.norm.kind} norms"] if config.norm.kind != "rms" else []
    activations = {layer.mlp.activation for layer in config.layers} - set(ACTIVATIONS)
    unknown += [f"activation {name!r}" for name in sorted(activations)]
    missing = parts_of(config) - SUPPORTED[backend]
    if len(missing) > 1:
        missing.discard(Part.MIXED)  # the differing feature is named
    return [*unknown, *(part.value for part in Part if part in missing)]


def require_supported(config: ModelConfig, backend: str) -> LayerSpec:
    """Return the model's first layer; raise `CheckpointError` for unsupported features."""
    if not config.layers:
        raise CheckpointError(f"the {config.architecture} model has no layers; use another")
    if found := missing_parts(config, backend):
        where = "training" if backend == "training" else f"the {backend} backend"
        torch_runs = backend != "torch" and not missing_parts(config, "torch") and backend != "training"
        raise CheckpointError(
            f"{where} does not support this {config.architecture} model's {', '.join(found)}; "
            f"use {'--backend torch' if torch_runs else 'another model'}"
        )
    return config.layers[0]


def _layer_parts(layer: LayerSpec, config: ModelConfig) -> Iterator[Part]:
    if layer.has_attention:
        yield from _attention_parts(layer.attention, config)
    if layer.recurrent is not None:
        yield Part.RECURRENT
    if (experts := layer.mlp.experts) is not None:
        yield Part.EXPERTS
        if experts.bias or experts.clamp is not None:
            yield Part.CLAMPED
    if layer.norms is not Norms.BEFORE:
        yield Part.NORMS
    if layer.residual_scale != 1:
        yield Part.SCALES
    if (part := ACTIVATIONS.get(layer.mlp.activation)) is not None:
        yield part


def _attention_parts(attention: AttentionSpec, config: ModelConfig) -> Iterator[Part]:
    rope = attention.rope or config.rope
    has = {
        Part.WINDOW: attention.window is not None and attention.window < config.context_length,
        Part.LATENT: attention.latent is not None,
        Part.SOFT_CAPS: attention.softcap is not None,
        Part.WIDE_NORM: attention.qk_norm and attention.wide_qk_norm,
        Part.SCALES: attention.scale is not None,
        Part.GATED: attention.gated,
        Part.SINKS: attention.sinks,
        Part.NO_ROPE: not attention.is_rotated,
        Part.LAYER_ROPE: attention.rope is not None,
        Part.PARTIAL_ROPE: rope.rotary_dim is not None,
        Part.ROPE_MAGNITUDE: rope.magnitude != 1,
    }
    yield from (part for part, there in has.items() if there)


BACKENDS = ("cpu", "cuda", "torch")
"""Columns of the table of families."""


@dataclass(frozen=True)
class SupportedFamily:
    """One row of the table."""

    models: str
    hf_class: str
    formats: str
    backends: dict[str, str]  # "yes" or "no: REASON"


def supported_families() -> list[SupportedFamily]:
    """Return all rows, as in `foreword models --supported`."""
    return [
        SupportedFamily(
            family.models,
            family.hf_class,
            f"safetensors, GGUF ({', '.join(names)})" if (names := _gguf_names(family)) else "safetensors",
            {backend: _verdict(family, backend) for backend in BACKENDS},
        )
        for family in ARCHITECTURES
    ]


def supported_markdown() -> str:
    headings = ("models", "class in config.json", "files", *BACKENDS)
    lines = [headings, ("---",) * len(headings)]
    for row in supported_families():
        lines.append((row.models, f"`{row.hf_class}`", row.formats, *row.backends.values()))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gguf_names(family: Architecture) -> tuple[str, ...]:
    forms = [form for form in (family.without_experts, family) if form is not None]
    stated = [form.gguf_alias if form.gguf is None else form.gguf.architecture for form in forms]
    return tuple(dict.fromkeys(name for name in stated if name is not None))


def _verdict(family: Architecture, backend: str) -> str:
    lacking = _always(family) - SUPPORTED[backend]
    if len(lacking) > 1:
        lacking.discard(Part.MIXED)
    return "no: " + ", ".join(part.value for part in Part if part in lacking) if lacking else "yes"


def _always(family: Architecture) -> set[Part]:
    scales, rope, experts, window = family.scales, family.rope, family.experts, family.window
    has = {
        Part.EXPERTS: experts is not None,
        Part.CLAMPED: experts is not None and (experts.bias or experts.clamp is not None),
        Part.LATENT: family.is_latent,
        Part.SINKS: family.has_sinks,
        Part.GATED: family.has_gated_attention,
        Part.RECURRENT: family.recurrent is not None,
        Part.SOFT_CAPS: scales.attention_cap is not None,
        Part.NORMS: family.norms is not Norms.BEFORE,
        Part.WIDE_NORM: family.wide_qk_norm,
        Part.SCALES: scales.embedding_by_width or scales.attention is not None,
        Part.NO_ROPE: rope.unrotated_every is not None,
        Part.LAYER_ROPE: rope.local_theta is not None,
        Part.PARTIAL_ROPE: rope.partial != 1,
        Part.GELU: family.activation.startswith("gelu"),
        Part.RELU2: family.activation == "relu2",
        Part.WINDOW: window is not None and window.layers is WindowedLayers.ALL_BUT_EVERY_NTH,
        Part.MIXED: experts is not None and experts.dense is DenseLayers.FIRST,
    }
    return {part for part, there in has.items() if there}
