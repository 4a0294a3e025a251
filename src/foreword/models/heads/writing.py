"""Heads in the layout of speculators."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from foreword.errors import RequestError
from foreword.models.heads.layouts.boundaries import IDS
from foreword.models.heads.layouts.eagle3 import section
from foreword.models.heads.layouts.names import SCALE
from foreword.models.heads.opening import Head

_OUTER_KEYS = frozenset(
    "acceptance_by_level architectures auto_map bias draft_vocab_size dtype eagle_config fc_norm norm_before_fc "
    "norm_before_residual norm_output num_aux_hidden_states quantization_config target_hidden_size target_layer_ids "
    f"torch_dtype transformers_version use_aux_norm {IDS}".split()
)
"""What a flat config says that is not about the layer."""


def write_head(
    head: Head, out: Path, tensors: Mapping[str, Tensor], extra: Mapping[str, Any] | None = None
) -> int:
    """Write config.json and model.safetensors into a new directory; returns their size in bytes."""
    if out.exists():
        raise RequestError(f"{out} exists; give a new directory")
    if head.spec.kind == "mtp":
        raise RequestError(f"{head.files.path}: an MTP module belongs to its target's files and stays there")
    out.mkdir(parents=True)
    stored = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    config = speculators_config(head) | dict(extra or {})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sum(file.stat().st_size for file in out.iterdir())


def stored_tensors(head: Head) -> dict[str, Tensor]:
    """The head's tensors as its files have them, by speculators' names; without those that it leaves to the target."""
    used = {*head.spec.shapes, *(name + SCALE for name in head.spec.shapes)}
    return {name: head.files.stored(name) for name in head.files.stored_names() if name in used}


def speculators_config(head: Head) -> dict[str, Any]:
    """config.json of an EAGLE-3 head as speculators has it. Other heads keep the config that they came with."""
    spec, given = head.spec, dict(head.files.config)
    if spec.kind == "medusa":  # vLLM's names, and what it wants to be told of them
        return given | {"vocab_size": spec.vocab_size, "medusa_fc_bias": spec.has("blocks.0.layers.0.bias")}
    if spec.kind != "eagle3":
        return given
    inner = section(head.files.fields, "transformer_layer_config")
    layer = dict(inner.values) if inner else {k: v for k, v in given.items() if k not in _OUTER_KEYS}
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": spec.draft_vocab_size,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.has("input_norm.weight"),
        "fc_norm": spec.has("fc_norm.0.weight"),
        "norm_output": spec.norm_output,
        "target_hidden_size": spec.target_hidden_size,
        "transformer_layer_config": layer | {"model_type": layer.get("model_type", "llama")},
    }
    if spec.boundaries is not None:
        config[IDS] = list(spec.boundaries)
    kept = ("speculators_config", "speculators_version", "quantization_config", "acceptance_by_level")
    return config | {key: given[key] for key in kept if key in given}
