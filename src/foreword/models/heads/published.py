"""Reads the descriptions of published heads: EAGLE-1 to -3, P-EAGLE, DFlash, DSpark and Medusa.

DFlash (z-lab, SpecForge, DeepSpec, speculators) drafts a block of tokens in one pass; DSpark adds a small Markov head
over the tokens of a block. Medusa's heads (Medusa, axolotl, vLLM) draft one position each and read no token.
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
    layer_ids,
    mask_token,
    named_boundaries,
    read_layers,
    sliding_window,
)
from foreword.models.heads.spec import CONFIDENCE, MARKOV, HeadSpec, Join, Shapes

MASK_HIDDEN = "mask_hidden"
"""P-EAGLE's tensor that replaces the hidden states of positions that the target has not computed."""

MAX_BLOCK = 64  # maximum block size: visibility within a block is a mask with one bit per row

_UNSUPPORTED = ("final_logit_softcapping", "output_multiplier", "input_embedding_scale")
"""Config keys of DFlash heads that change the computation and are not supported."""


class _Body(NamedTuple):
    """Settings that the configs of EAGLE-3 and DFlash have in common."""

    fields: ConfigFields  # settings of the head's layers
    layers: tuple[LayerSpec, ...]
    hidden: int  # hidden size of the head
    vocab: int  # vocabulary size of the target
    sizes: dict[str, int]  # the fields draft_vocab_size and target_hidden_size of `HeadSpec`
    required: Shapes  # required tensors of embedding, output and vocabulary
    optional: Shapes  # optional ones


def _body(files: HeadFiles) -> _Body:
    """Read the settings that EAGLE-3 and DFlash have in common."""
    fields = files.fields
    inner = fields.section("transformer_layer_config") or fields
    hidden, vocab = inner.count("hidden_size"), inner.count("vocab_size")
    sizes = {
        "draft_vocab_size": fields.count("draft_vocab_size", vocab),
        "target_hidden_size": fields.count("target_hidden_size", hidden),
    }
    shapes = vocabulary_shapes(vocab, sizes["draft_vocab_size"], hidden)
    return _Body(inner, read_layers(inner, files.shapes), hidden, vocab, sizes, *shapes)


def read_eagle3(files: HeadFiles) -> HeadSpec:
    """Return the description of an EAGLE-3 or P-EAGLE head, read from its tensors where possible."""
    fields, body = files.fields, _body(files)
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


def read_dflash(files: HeadFiles) -> HeadSpec:
    """Return the description of a DFlash or DSpark head."""
    fields, body = files.fields, _body(files)
    nested = fields.section("dflash_config") or ConfigFields({}, fields.origin)
    for key in _UNSUPPORTED:
        if body.fields.get(key) is not None or nested.get(key) is not None:
            raise body.fields.unsupported(f"a DFlash head with {key}")
    hidden, width = body.hidden, body.sizes["target_hidden_size"]
    taps = count_taps(files, width)
    required, optional = dict(body.required), dict(body.optional)
    required |= {"fc.weight": (hidden, taps * width)}
    required |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    required |= all_layer_shapes(body.layers, hidden, first_inputs=hidden, first_norm=True)
    if nested.flag("use_swa", False):  # z-lab's configs have the window in `dflash_config`
        window: int | None = nested.count("swa_window_size")
    else:
        window = sliding_window(body.fields, len(body.layers))
    is_dspark = MARKOV[0] + ".weight" in files.shapes
    if is_dspark:
        markov, confidence = _dspark_shapes(files, body.vocab, body.sizes["draft_vocab_size"], hidden)
        required, optional = {**required, **markov}, {**optional, **confidence}
    block_size = nested.count("block_size", fields.count("block_size", 16))
    if not 2 <= block_size <= MAX_BLOCK:
        raise fields.unsupported(f"a block of {block_size} (2 to {MAX_BLOCK} can be run)")
    classes = fields.get("architectures")
    # DeepSpec's DFlash heads have a DSpark class, too, and draft from the newest token's row.
    is_deepspec = isinstance(classes, list) and any("DSpark" in str(name) for name in classes)
    return build_head_spec(
        "dspark" if is_dspark else "dflash",
        Join.CONTEXT,
        body.fields,
        body.layers,
        checked_shapes(files, required, optional),
        **body.sizes,
        num_taps=taps,
        boundaries=_boundaries(fields, nested, taps),
        reads_normed=False,
        mask_token_id=mask_token(fields, body.vocab),
        block_size=block_size,
        is_causal=_is_causal(fields, body.fields, nested, window is not None),
        anchor_drafts=fields.flag("sample_from_anchor", is_dspark or is_deepspec),
        norm_output=is_dspark,  # DSpark's confidence head reads normalised states
        window=window,
    )


def _is_causal(fields: ConfigFields, inner: ConfigFields, nested: ConfigFields, has_window: bool) -> bool:
    """Return whether the rows of a block attend only to earlier rows; by default, if the head has a window.

    JetSpec's key is `causal_head`. speculators' `sliding_window_non_causal` is the inverse, and true if absent.
    """
    for section, key in (
        (fields, "is_causal"),
        (inner, "is_causal"),
        (nested, "causal"),
        (nested, "causal_head"),
    ):
        if section.get(key) is not None:
            return section.flag(key, False)
    if "speculators_model_type" in fields.values:
        return has_window and not fields.flag("sliding_window_non_causal", True)
    return has_window


def _dspark_shapes(files: HeadFiles, vocab: int, draft_vocab: int, hidden: int) -> tuple[Shapes, Shapes]:
    """Return the shapes of a DSpark head's (required, optional) tensors, besides those of DFlash.

    Required are the two matrices of a plain Markov head, and optional those of a confidence head. A gated or recurrent
    Markov head has other tensors, which `checked_shapes` refuses.
    """
    first, second = f"{MARKOV[0]}.weight", f"{MARKOV[1]}.weight"
    rank = files.shapes[first][-1]
    weight = CONFIDENCE + ".weight"
    width = files.shapes[weight][-1] if weight in files else hidden
    if width not in (hidden, hidden + rank):
        raise CheckpointError(f"{files.path}: {weight} reads {width} numbers; get the head again")
    required = {first: (vocab, rank), second: (draft_vocab, rank)}
    return required, {weight: (1, width), CONFIDENCE + ".bias": (1,)}


def _boundaries(fields: ConfigFields, nested: ConfigFields, taps: int) -> tuple[int, ...] | None:
    """Return the layer boundaries that a DFlash head reads; None: the config does not name them.

    Layer i of `target_layer_ids` is boundary i + 1; speculators' `aux_hidden_state_layer_ids` are boundaries.
    """
    stated = {
        layer_ids(nested, "target_layer_ids", 1),
        layer_ids(fields, "target_layer_ids", 1),
        layer_ids(fields, "aux_hidden_state_layer_ids", 0),
    } - {()}
    if len(stated) > 1 or any(len(ids) != taps for ids in stated):
        raise CheckpointError(
            f"{fields.origin}: the layers that it names do not fit fc.weight, which reads {taps} hidden states; "
            "get the head again"
        )
    return stated.pop() if stated else None


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
