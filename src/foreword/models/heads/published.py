"""Reads the descriptions of published heads: EAGLE-1 to -3, P-EAGLE and Medusa.

Medusa's heads (Medusa, axolotl, vLLM) draft one position each and read no token.
"""

import re
from typing import Any, NamedTuple

from foreword.errors import CheckpointError
from foreword.models.config import LayerSpec, NormSpec, RopeSpec
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.hf.rope import rope_spec
from foreword.models.heads.files import HeadFiles, checked_shapes, vocabulary_shapes
from foreword.models.heads.names import (
    all_layer_shapes,
    mask_token,
    named_boundaries,
    read_layers,
    sliding_window,
)
from foreword.models.heads.spec import HeadSpec, Join, Shapes

MASK_HIDDEN = "mask_hidden"
"""P-EAGLE's tensor that replaces the hidden states of positions that the target has not computed."""


class HeadBody(NamedTuple):
    """Settings that the configs of EAGLE-3 and DFlash have in common."""

    fields: ConfigFields  # settings of the head's layers
    layers: tuple[LayerSpec, ...]
    hidden: int  # hidden size of the head
    vocab: int  # vocabulary size of the target
    sizes: dict[str, int]  # the fields draft_vocab_size and target_hidden_size of `HeadSpec`
    required: Shapes  # required tensors of embedding, output and vocabulary
    optional: Shapes  # optional ones


def read_body(files: HeadFiles) -> HeadBody:
    """Read the settings that EAGLE-3 and DFlash have in common."""
    fields = files.fields
    inner = fields.section("transformer_layer_config") or fields
    hidden, vocab = inner.count("hidden_size"), inner.count("vocab_size")
    sizes = {
        "draft_vocab_size": fields.count("draft_vocab_size", vocab),
        "target_hidden_size": fields.count("target_hidden_size", hidden),
    }
    shapes = vocabulary_shapes(vocab, sizes["draft_vocab_size"], hidden)
    return HeadBody(inner, read_layers(inner, files.shapes), hidden, vocab, sizes, *shapes)


def read_eagle3(files: HeadFiles) -> HeadSpec:
    """Return the description of an EAGLE-3 or P-EAGLE head, read from its tensors where possible."""
    fields, body = files.fields, read_body(files)
    is_parallel, has_fc = MASK_HIDDEN in files.shapes, "fc.weight" in files.shapes
    hidden, width = body.hidden, body.sizes["target_hidden_size"]
    boundaries, taps = named_boundaries(fields), count_taps(files, width) if has_fc else 1
    if boundaries is not None and has_fc and len(boundaries) != taps:
        raise CheckpointError(
            f"{files.path}: fc.weight reads {taps} hidden states of {width} numbers and the config names "
            f"{len(boundaries)} layers; get the head again"
        )
    required = {
        **body.required,
        **all_layer_shapes(body.layers, hidden, first_inputs=2 * hidden, first_norm=False),
        **_input_shapes(files, hidden, taps, width),
    }
    optional = {
        **body.optional,
        "fc.bias": (hidden,),
        "norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        MASK_HIDDEN: (1, 1, taps * width),
    }
    return build_head_spec(
        "p_eagle" if is_parallel else "eagle3",
        Join.CONCAT,
        body.fields,
        body.layers,
        checked_shapes(files, required, optional),
        **body.sizes,
        num_taps=taps,
        boundaries=boundaries if has_fc else None,
        reads_normed=not has_fc,
        # The default is True in speculators' files, as in vLLM, and False in those of EAGLE and P-EAGLE.
        norm_before_residual=fields.flag(
            "norm_before_residual", "speculators_model_type" in fields.values and not is_parallel
        ),
        norm_output=fields.flag("norm_output", False),
        mask_token_id=mask_token(fields, body.vocab) if is_parallel else None,
        window=sliding_window(body.fields, len(body.layers)),
    )


def build_head_spec(
    kind: str,
    join: Join,
    inner: ConfigFields,
    layers: tuple[LayerSpec, ...],
    shapes: Shapes,
    **more: Any,  # noqa: ANN401 - other fields of HeadSpec
) -> HeadSpec:
    """Build the description of a head. By default the head reads the target's states after the final norm."""
    hidden, vocab = inner.count("hidden_size"), inner.count("vocab_size")
    defaults: dict[str, Any] = {
        "norm": NormSpec(inner.number("rms_norm_eps", 1e-6)),
        "draft_vocab_size": vocab,
        "target_hidden_size": hidden,
        "num_taps": 1,
        "boundaries": None,
        "reads_normed": True,
    }
    rope = more.pop("rope", None) or rope_spec(inner)
    return HeadSpec(
        kind=kind,
        hidden_size=hidden,
        vocab_size=vocab,
        layers=layers,
        rope=rope,
        join=join,
        shapes=shapes,
        **defaults | more,
    )


def count_taps(files: HeadFiles, target_hidden: int) -> int:
    """Return how many hidden states of the target fc.weight reads."""
    columns = files.shapes["fc.weight"][-1]
    if columns % target_hidden:
        raise CheckpointError(
            f"{files.path}: fc.weight reads {columns} numbers, not a multiple of the target's {target_hidden}; "
            "get the head again"
        )
    return columns // target_hidden


def _input_shapes(files: HeadFiles, hidden: int, taps: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of fc.weight, the first hidden_norm and the norms before fc; none without fc.weight."""
    if "fc.weight" not in files:
        return {}
    fields = files.fields
    nested = fields.section("eagle_config") or ConfigFields({}, fields.origin)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * width)}
    shapes["layers.0.hidden_norm.weight"] = (hidden,)
    has_joint_norm = fields.flag("norm_before_fc", nested.flag("norm_before_fc", False))
    has_tap_norms = fields.flag("fc_norm", fields.flag("use_aux_norm", False))
    if has_joint_norm or "input_norm.weight" in files:
        shapes["input_norm.weight"] = (taps * width,)
    if has_tap_norms or "fc_norm.0.weight" in files:
        shapes |= {f"fc_norm.{tap}.weight": (width,) for tap in range(taps)}
    if "input_norm.weight" in shapes and "fc_norm.0.weight" in shapes:
        raise CheckpointError(
            f"{files.path}: norm_before_fc and fc_norm exclude each other; get the head again"
        )
    return shapes


def read_eagle(files: HeadFiles) -> HeadSpec:
    """Return the description of an EAGLE-1 or -2 head. fc has a bias if the file has one."""
    inner = files.fields.section("model") or files.fields  # vLLM's conversions nest the layer's config
    hidden, vocab = inner.count("hidden_size"), inner.count("vocab_size")
    layers = read_layers(inner, files.shapes)
    required, optional = vocabulary_shapes(vocab, vocab, hidden)
    required = {**required, "fc.weight": (hidden, 2 * hidden)}
    required |= all_layer_shapes(layers, hidden, first_inputs=hidden, first_norm=False)
    shapes = checked_shapes(files, required, {**optional, "fc.bias": (hidden,)})
    window = sliding_window(inner, len(layers))
    return build_head_spec("eagle", Join.FUSED, inner, layers, shapes, window=window)


_MEDUSA_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.")
_MEDUSA_TENSOR = re.compile(r"^(blocks|lm_heads)\.\d+\.|^token_map$")


def medusa_files(files: HeadFiles) -> HeadFiles:
    """Return a view with only the tensors of the Medusa heads; a Medusa-2 file also has a whole model."""
    return files.renamed({name: name for name in files.shapes if _MEDUSA_TENSOR.match(name)})


def read_medusa(files: HeadFiles) -> HeadSpec:
    """Return the description of Medusa heads. Heads and blocks are counted, since configs are often wrong."""
    present, fields = files.shapes, files.fields
    numbers = [(int(m[1]), int(m[2])) for name in present if (m := _MEDUSA_BLOCK.match(name))]
    heads, blocks = 1 + max(head for head, _ in numbers), 1 + max(block for _, block in numbers)
    hidden = present["blocks.0.layers.0.weight"][0] if "blocks.0.layers.0.weight" in present else 0
    outputs = [shape[0] for name, shape in present.items() if name.startswith("lm_heads.")]
    tokens = outputs[0] if outputs else fields.count("vocab_size")
    if "token_map" in present and not outputs:
        raise CheckpointError(f"{files.path} has a token_map and no lm_heads; get the head again")
    required: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {"token_map": (tokens,)}
    for head in range(heads):
        for block in range(blocks):
            required[f"blocks.{head}.layers.{block}.weight"] = (hidden, hidden)
            optional[f"blocks.{head}.layers.{block}.bias"] = (hidden,)
        if outputs:
            required[f"lm_heads.{head}.weight"] = (tokens, hidden)
    return HeadSpec(
        kind="medusa",
        hidden_size=hidden,
        layers=(),
        norm=NormSpec(1e-6),
        rope=RopeSpec(10000.0),
        # Heads over the whole vocabulary determine its size; otherwise the config must state it.
        vocab_size=fields.count("vocab_size") if "token_map" in present else tokens,
        draft_vocab_size=tokens,
        target_hidden_size=hidden,
        num_taps=1,
        boundaries=None,
        reads_normed=True,
        join=Join.NONE,
        shapes=checked_shapes(files, required, optional),
        num_heads=heads,
        blocks_per_head=blocks,
    )
