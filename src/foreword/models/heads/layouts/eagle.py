"""EAGLE heads: EAGLE-3 in all published layouts, and EAGLE-1 and -2, which share one layout."""

from collections.abc import Mapping
from typing import Any

from foreword.errors import CheckpointError
from foreword.models.config import LayerSpec, NormSpec
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.hf.rope import rope_spec
from foreword.models.heads.files import HeadFiles, checked_shapes, vocabulary_shapes
from foreword.models.heads.layouts.common import all_layer_shapes, mask_token, named_boundaries, read_layers
from foreword.models.heads.spec import HeadSpec, Join, Shapes

MASK_HIDDEN = "mask_hidden"
"""P-EAGLE's placeholder for hidden states of unknown positions."""


def read_eagle3(files: HeadFiles) -> HeadSpec:
    """Read the head's description, from tensors where possible."""
    fields, present = files.fields, files.shapes
    is_parallel = MASK_HIDDEN in present
    inner = section(fields, "transformer_layer_config") or fields
    hidden, vocab = inner.count("hidden_size"), inner.count("vocab_size")
    target_hidden = fields.count("target_hidden_size", hidden)
    draft_vocab = fields.count("draft_vocab_size", vocab)
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
        **all_layer_shapes(layers, hidden, first_inputs=2 * hidden, first_norm=False),
        **_input_shapes(files, hidden, taps, target_hidden),
    }
    optional = {
        **optional,
        "fc.bias": (hidden,),
        "norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        MASK_HIDDEN: (1, 1, taps * target_hidden),
    }
    return described(
        "p_eagle" if is_parallel else "eagle3",
        Join.CONCAT,
        inner,
        layers,
        checked_shapes(files, required, optional),
        draft_vocab_size=draft_vocab,
        target_hidden_size=target_hidden,
        num_taps=taps,
        boundaries=boundaries if has_fc else None,
        reads_normed=not has_fc,
        # speculators' files default to True (as in vLLM); EAGLE's own and P-EAGLE to False.
        norm_before_residual=fields.flag(
            "norm_before_residual", "speculators_model_type" in fields.values and not is_parallel
        ),
        norm_output=fields.flag("norm_output", False),
        mask_token_id=mask_token(fields, vocab) if is_parallel else None,
    )


def described(
    kind: str,
    join: Join,
    inner: ConfigFields,
    layers: tuple[LayerSpec, ...],
    shapes: Shapes,
    **more: Any,  # noqa: ANN401 - other fields of HeadSpec
) -> HeadSpec:
    """Create a spec; by default the head reads the target's last hidden states after the final norm."""
    hidden, vocab = inner.count("hidden_size"), inner.count("vocab_size")
    usual: dict[str, Any] = {
        "norm": NormSpec(inner.number("rms_norm_eps", 1e-6)),
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "target_hidden_size": hidden,
        "num_taps": 1,
        "boundaries": None,
        "reads_normed": True,
    }
    rope = more.pop("rope", None) or rope_spec(inner)
    return HeadSpec(
        kind=kind, hidden_size=hidden, layers=layers, rope=rope, join=join, shapes=shapes, **usual | more
    )


def section(fields: ConfigFields, key: str) -> ConfigFields | None:
    """Return an object inside the config."""
    value = fields.get(key)
    return ConfigFields(value, fields.origin) if isinstance(value, Mapping) else None


def count_taps(files: HeadFiles, target_hidden: int) -> int:
    """Return the number of hidden states that fc.weight reads."""
    columns = files.shapes["fc.weight"][-1]
    if columns % target_hidden:
        raise CheckpointError(
            f"{files.path}: fc.weight reads {columns} numbers, not a multiple of the target's {target_hidden}; "
            "get the head again"
        )
    return columns // target_hidden


def _input_shapes(files: HeadFiles, hidden: int, taps: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors applied to features. Norms are present if the config or the file has them."""
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
    """Read the head's description. The file decides whether fc has a bias."""
    fields = files.fields
    inner = section(fields, "model") or fields  # vLLM's conversions nest the layer's config
    hidden, vocab = inner.count("hidden_size"), inner.count("vocab_size")
    layers = read_layers(inner, files.shapes)
    required, optional = vocabulary_shapes(vocab, vocab, hidden)
    required = {**required, "fc.weight": (hidden, 2 * hidden)}
    required |= all_layer_shapes(layers, hidden, first_inputs=hidden, first_norm=False)
    return described(
        "eagle",
        Join.FUSED,
        inner,
        layers,
        checked_shapes(files, required, {**optional, "fc.bias": (hidden,)}),
    )
