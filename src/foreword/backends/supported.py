"""Table of supported model families by backend, from declarations."""

from dataclasses import dataclass

from foreword.backends.support import SUPPORTED, Part
from foreword.models.architectures.architecture import Architecture, DenseLayers, WindowedLayers
from foreword.models.architectures.registry import ARCHITECTURES
from foreword.models.config import Norms

BACKENDS = ("cpu", "cuda", "torch")


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
            "safetensors" if _gguf_name(family) is None else f"safetensors, GGUF ({_gguf_name(family)})",
            {backend: _verdict(family, backend) for backend in BACKENDS},
        )
        for family in ARCHITECTURES
    ]


def supported_markdown() -> str:
    """Return the table for docs/models.md."""
    headings = ("models", "class in config.json", "files", *BACKENDS)
    lines = [headings, ("---",) * len(headings)]
    for row in supported_families():
        lines.append((row.models, f"`{row.hf_class}`", row.formats, *row.backends.values()))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gguf_name(family: Architecture) -> str | None:
    return family.gguf_alias if family.gguf is None else family.gguf.architecture


def _verdict(family: Architecture, backend: str) -> str:
    lacking = _always(family) - SUPPORTED[backend]
    if len(lacking) > 1:
        lacking.discard(Part.MIXED)
    return "no: " + ", ".join(part.value for part in Part if part in lacking) if lacking else "yes"


def _always(family: Architecture) -> set[Part]:
    """Return the features that all models of a family have."""
    scales, rope, experts, window = family.scales, family.rope, family.experts, family.window
    has = {
        Part.EXPERTS: experts is not None,
        Part.CLAMPED: experts is not None and (experts.bias or experts.clamp is not None),
        Part.LATENT: family.is_latent,
        Part.SINKS: family.has_sinks,
        Part.GATED: family.has_gated_attention,
        Part.RECURRENT: family.recurrent is not None,
        Part.CAPS: scales.attention_cap is not None,
        Part.NORMS: family.norms is not Norms.BEFORE,
        Part.WIDE_NORM: family.wide_qk_norm,
        Part.SCALES: scales.embedding_by_width or scales.attention is not None,
        Part.NO_ROPE: rope.unrotated_every is not None,
        Part.OTHER_ROPE: rope.local_theta is not None,
        Part.PART_ROPE: rope.partial != 1,
        Part.GELU: family.activation.startswith("gelu"),
        Part.RELU2: family.activation == "relu2",
        Part.WINDOW: window is not None and window.layers is WindowedLayers.ALL_BUT_EVERY_NTH,
        Part.MIXED: experts is not None and experts.dense is DenseLayers.FIRST,
    }
    return {part for part, there in has.items() if there}
