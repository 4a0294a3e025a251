"""Describes drafter weights: a draft head, an early exit or a draft model."""

from math import prod
from pathlib import Path
from typing import Any

from foreword.models.formats.hf.checkpoint import HfCheckpoint
from foreword.models.heads.files import HeadFiles
from foreword.models.heads.names import head_kind
from foreword.models.heads.opening import Head, open_head
from foreword.models.heads.spec import TABLES, HeadSpec, Join


def describe_head(head: Head) -> dict[str, Any]:
    """Return the properties of a head that `foreword head` prints, as JSON values."""
    spec = head.spec
    return {
        "path": str(head.files.path),
        "method": spec.kind,
        "layout": _layout(head),
        "parameters": sum(prod(shape) for name, shape in spec.shapes.items() if name not in TABLES),
        **_drafted(spec),
        **_layers(spec),
        "hidden_size": spec.hidden_size,
        "target_hidden_size": spec.target_hidden_size,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "reads": _reads(spec),
        "norms": _norms(spec),
        "biases": sorted(name.removesuffix(".bias") for name in spec.shapes if name.endswith(".bias")),
        "borrows": [name.removesuffix(".weight") for name in _borrowed(spec)],
        "eight_bit": head.files.bits == 8,
        "bits": head.files.bits,
    }


def _drafted(spec: HeadSpec) -> dict[str, Any]:
    """Return the number of tokens that the head drafts in one pass, and its mask token; empty: one token."""
    if spec.join is Join.NONE:
        return {"guesses_at_once": spec.num_heads, "blocks_of_each": spec.blocks_per_head}
    if spec.join is Join.CONTEXT:
        # A block begins with the newest token of the text, whose row predicts a token only with `anchor_drafts`.
        draft_tokens = spec.block_size if spec.anchor_drafts else spec.block_size - 1
        return {"guesses_at_once": draft_tokens, "mask_token": spec.mask_token_id}
    return {} if spec.mask_token_id is None else {"guesses_at_once": "any", "mask_token": spec.mask_token_id}


def _layers(spec: HeadSpec) -> dict[str, Any]:
    if not spec.layers:
        return {"layers": 0}
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    return {
        "layers": len(spec.layers),
        "heads": attention.num_heads,
        "kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": mlp.intermediate_size,
        "rope_theta": spec.rope.theta,
        **({} if spec.window is None else {"window": spec.window}),
    }


def _borrowed(spec: HeadSpec) -> list[str]:
    """Return the matrices of the target that the head uses."""
    if spec.join is Join.NONE:
        return [] if spec.has("lm_heads.0.weight") else ["lm_head.weight"]
    return [name for name in ("embed_tokens.weight", "lm_head.weight") if not spec.has(name)]


def _layout(head: Head) -> str:
    """Return the publisher's name of the file layout."""
    config = head.files.config
    if "speculators_model_type" in config:
        return "speculators"
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "unnamed"


def _reads(spec: HeadSpec) -> str:
    """Return which hidden states of the target the head reads, in words."""
    if spec.reads_normed:
        return "the last hidden states, after the final norm"
    if spec.boundaries is None:
        spread = "spread over its layers" if spec.join is Join.CONTEXT else "after layers 2, n/2 and n-3 of n"
        return f"{spec.num_taps} hidden states, {spread}"
    return "hidden states after layers " + ", ".join(map(str, spec.boundaries))


def _norms(spec: HeadSpec) -> list[str]:
    is_present = {
        "norm_before_fc": spec.has("input_norm.weight"),
        "fc_norm": spec.has("fc_norm.0.weight"),
        "norm_before_residual": spec.norm_before_residual,
        "norm_output": spec.norm_output,
        "final norm": spec.has("norm.weight"),
    }
    return [name for name, present in is_present.items() if present]


_EMBEDDING = "model.embed_tokens.weight"


def trained_kind(path: Path) -> str | None:
    """Return what `foreword train` calls the weights at a path: a head's method, "exit" or "draft"; None: unknown."""
    files = HeadFiles(path)
    kind = head_kind(files.shapes)
    if kind is None and path.is_dir():
        if "exit_layer" in files.config:
            return "exit"
        if "architectures" in files.config and _EMBEDDING in HfCheckpoint(path).tensor_names():
            return "draft"
    return kind


def describe_trained(path: Path) -> dict[str, Any]:
    """Return the properties of a head, an early exit or a draft model, as JSON values."""
    kind = trained_kind(path)
    if kind not in ("exit", "draft"):
        return describe_head(open_head(path))
    files, config = HeadFiles(path), HfCheckpoint(path).config
    use = {"method": "draft_model", "model": str(path)}
    described: dict[str, Any] = {
        "path": str(path),
        "method": "draft_model",
        "what": "a whole model that drafts",
    }
    if kind == "exit":
        layer = files.fields.count("exit_layer")
        use = {"method": "layer_skip", "adapter": str(path)}
        described |= {
            "method": "layer_skip",
            "what": f"an early exit: {config.num_layers} layer and a norm after the target's first {layer} layers",
            "exit_layer": layer,
            "exit_of": str(files.config.get("exit_of", "")),
        }
    rates = files.config.get("acceptance_by_level")
    return {
        **described,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        **({"acceptance_by_level": rates} if isinstance(rates, list) else {}),
        "speculation": use,
    }
