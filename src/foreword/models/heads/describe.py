"""What a head is, in words and numbers."""

from math import prod
from typing import Any

from foreword.models.heads.opening import Head
from foreword.models.heads.spec import HeadSpec


def describe_head(head: Head) -> dict[str, Any]:
    """For people and for JSON."""
    spec = head.spec
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    borrowed = [name for name in ("embed_tokens.weight", "lm_head.weight") if not spec.has(name)]
    return {
        "path": str(head.files.path),
        "method": spec.kind,
        "layout": _layout(head),
        "parameters": sum(prod(shape) for name, shape in spec.shapes.items() if name not in ("d2t", "t2d")),
        "layers": len(spec.layers),
        "hidden_size": spec.hidden_size,
        "target_hidden_size": spec.target_hidden_size,
        "heads": attention.num_heads,
        "kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": mlp.intermediate_size,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "reads": _reads(spec),
        "rope_theta": spec.rope.theta,
        "norms": _norms(spec),
        "biases": sorted(name.removesuffix(".bias") for name in spec.shapes if name.endswith(".bias")),
        "borrows": [name.removesuffix(".weight") for name in borrowed],
        "eight_bit": head.files.is_quantized,
    }


def _layout(head: Head) -> str:
    config = head.files.config
    if "speculators_model_type" in config:
        return "speculators"
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "unnamed"


def _reads(spec: HeadSpec) -> str:
    if spec.reads_normed:
        return "the last hidden states, after the final norm"
    if spec.boundaries is None:
        return f"{spec.num_taps} hidden states, after layers 2, half and all but 3"
    return "hidden states after layers " + ", ".join(map(str, spec.boundaries))


def _norms(spec: HeadSpec) -> list[str]:
    found = {
        "norm_before_fc": spec.has("input_norm.weight"),
        "fc_norm": spec.has("fc_norm.0.weight"),
        "norm_before_residual": spec.norm_before_residual,
        "norm_output": spec.norm_output,
        "final norm": spec.has("norm.weight"),
    }
    return [name for name, is_there in found.items() if is_there]
