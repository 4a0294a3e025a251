"""Tells what a directory of drafter weights is: a draft head, an early exit or a whole draft model."""

from pathlib import Path
from typing import Any

from foreword.models.formats.hf.checkpoint import HfCheckpoint
from foreword.models.heads.describe import describe_head
from foreword.models.heads.files import HeadFiles
from foreword.models.heads.layouts.kinds import head_kind
from foreword.models.heads.opening import open_head

_EMBEDDING = "model.embed_tokens.weight"


def trained_kind(path: Path) -> str | None:
    """Return a head's method, "exit" or "draft", as `foreword train` names them; None for files of another kind."""
    files = HeadFiles(path)
    kind = head_kind(files.shapes)
    if kind is None and path.is_dir():
        if "exit_layer" in files.config:
            return "exit"
        if "architectures" in files.config and _EMBEDDING in HfCheckpoint(path).tensor_names():
            return "draft"
    return kind


def describe_trained(path: Path) -> dict[str, Any]:
    """Return what these weights are and how speculation uses them, for people and for JSON."""
    kind = trained_kind(path)
    if kind not in ("exit", "draft"):
        return describe_head(open_head(path))
    files, config = HeadFiles(path), HfCheckpoint(path).config
    use = {"method": "draft_model", "model": str(path)}
    found: dict[str, Any] = {"path": str(path), "method": "draft_model", "what": "a whole model that drafts"}
    if kind == "exit":
        layer = files.fields.count("exit_layer")
        use = {"method": "layer_skip", "adapter": str(path)}
        found |= {
            "method": "layer_skip",
            "what": f"an early exit: {config.num_layers} layer and a norm after the target's first {layer} layers",
            "exit_layer": layer,
            "exit_of": str(files.config.get("exit_of", "")),
        }
    rates = files.config.get("acceptance_by_level")
    return {
        **found,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        **({"acceptance_by_level": rates} if isinstance(rates, list) else {}),
        "speculation": use,
    }
