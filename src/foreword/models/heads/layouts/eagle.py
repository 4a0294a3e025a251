"""EAGLE heads: EAGLE-3 as its publishers write it, and EAGLE-1 and -2, the same weights under two names."""

from collections.abc import Mapping

from foreword.errors import CheckpointError
from foreword.models.config import LayerSpec
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.hf.rope import rope_spec
from foreword.models.heads.files import HeadFiles, checked_shapes, vocabulary_shapes
from foreword.models.heads.layouts.common import (
    layer_shapes,
    mask_token,
    named_boundaries,
    read_layers,
    read_norm,
)
from foreword.models.heads.spec import HeadSpec, Join

MASK_HIDDEN = "mask_hidden"
"""P-EAGLE's stand-in for the target's hidden states at places that are not known yet."""


def read_eagle3(files: HeadFiles) -> HeadSpec:
    """The head that these files describe; what the tensors tell is not asked of the config."""
    fields, present = files.fields, files.shapes
    is_parallel = MASK_HIDDEN in present
    inner = section(fields, "transformer_layer_config") or fields
    hidden, vocab = inner.count("hidden_size"), inner.count("vocab_size")
    target_hidden, draft_vocab = (
        fields.count("target_hidden_size", hidden),
        fields.count("draft_vocab_size", vocab),
    )
    layers, boundaries, has_fc = read_layers(inner, present), named_boundaries(fields), "fc.weight" in present
    taps = count_taps(files, target_hidden) if has_fc else 1
    if boundaries is not None and has_fc and len(boundaries) != taps:
        raise CheckpointError(
            f"{files.path}: fc.weight reads {taps} hidden states of {target_hidden} numbers and the config names "
            f"{len(boundaries)} layers; get the head again"
        )
    required, optional = vocabulary_shapes(vocab, draft_vocab, hidden)
    required = {
        **required,
        **_layer_shapes(layers, hidden),
        **_input_shapes(files, hidden, taps, target_hidden),
    }
    optional = {
        **optional,
        "fc.bias": (hidden,),
        "norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        MASK_HIDDEN: (1, 1, taps * target_hidden),
    }
    return HeadSpec(
        kind="p_eagle" if is_parallel else "eagle3",
        hidden_size=hidden,
        layers=layers,
        norm=read_norm(inner),
        rope=rope_spec(inner),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        target_hidden_size=target_hidden,
        num_taps=taps,
        boundaries=boundaries if has_fc else None,
        reads_normed=not has_fc,
        join=Join.CONCAT,
        shapes=checked_shapes(files, required, optional),
        # Files in speculators' layout that say nothing mean True (vLLM reads them so); EAGLE's own and P-EAGLE False.
        norm_before_residual=fields.flag(
            "norm_before_residual", "speculators_model_type" in fields.values and not is_parallel
        ),
        norm_output=fields.flag("norm_output", False),
        mask_token_id=mask_token(fields, vocab) if is_parallel else None,
    )


def section(fields: ConfigFields, key: str) -> ConfigFields | None:
    """An object inside the config."""
    value = fields.get(key)
    return ConfigFields(value, fields.origin) if isinstance(value, Mapping) else None


def count_taps(files: HeadFiles, target_hidden: int) -> int:
    """Hidden states of the target that fc.weight reads."""
    columns = files.shapes["fc.weight"][-1]
    if columns % target_hidden:
        raise CheckpointError(
            f"{files.path}: fc.weight reads {columns} numbers, not a multiple of the target's {target_hidden}; "
            "get the head again"
        )
    return columns // target_hidden


def _layer_shapes(layers: tuple[LayerSpec, ...], hidden: int) -> dict[str, tuple[int, ...]]:
    """The first layer reads embedding and features side by side, the others are llama's."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(layers):
        shapes |= layer_shapes(index, layer, hidden, hidden if index else 2 * hidden)
        if index:
            shapes[f"layers.{index}.input_layernorm.weight"] = (hidden,)
    return shapes


def _input_shapes(files: HeadFiles, hidden: int, taps: int, width: int) -> dict[str, tuple[int, ...]]:
    """What the features go through. A norm is there if the config asks for it, or if the file has it."""
    if "fc.weight" not in files:
        return {}
    fields = files.fields
    nested = section(fields, "eagle_config") or ConfigFields({}, fields.origin)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * width)}
    shapes["layers.0.hidden_norm.weight"] = (hidden,)
    whole = fields.flag("norm_before_fc", nested.flag("norm_before_fc", False))
    each = fields.flag("fc_norm", fields.flag("use_aux_norm", False))
    if whole or "input_norm.weight" in files:
        shapes["input_norm.weight"] = (taps * width,)
    if each or "fc_norm.0.weight" in files:
        shapes |= {f"fc_norm.{tap}.weight": (width,) for tap in range(taps)}
    if "input_norm.weight" in shapes and "fc_norm.0.weight" in shapes:
        raise CheckpointError(
            f"{files.path}: norm_before_fc and fc_norm exclude each other; get the head again"
        )
    return shapes


def read_eagle(files: HeadFiles) -> HeadSpec:
    """The head that these files describe. Whether its fc has a bias is up to the file, whatever the config says."""
    fields = files.fields
    inner = section(fields, "model") or fields  # vLLM's conversions keep the layer's config inside
    hidden, vocab = inner.count("hidden_size"), inner.count("vocab_size")
    layers = read_layers(inner, files.shapes)
    required, optional = vocabulary_shapes(vocab, vocab, hidden)
    required = {**required, "fc.weight": (hidden, 2 * hidden)}
    for index, layer in enumerate(layers):
        required |= layer_shapes(index, layer, hidden, hidden)
        if index:
            required[f"layers.{index}.input_layernorm.weight"] = (hidden,)
    return HeadSpec(
        kind="eagle",
        hidden_size=hidden,
        layers=layers,
        norm=read_norm(inner),
        rope=rope_spec(inner),
        vocab_size=vocab,
        draft_vocab_size=vocab,
        target_hidden_size=hidden,
        num_taps=1,
        boundaries=None,
        reads_normed=True,
        join=Join.FUSED,
        shapes=checked_shapes(files, required, {**optional, "fc.bias": (hidden,)}),
    )
