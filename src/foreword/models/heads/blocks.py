"""Reads the descriptions of published heads that draft a block of tokens in one pass: DFlash, DSpark and DFlash2.

DFlash is by z-lab, SpecForge, DeepSpec and speculators. DSpark adds a Markov head over the tokens of a block. DFlash2
adds short convolutions over the rows of a block, and a selector of one of the best candidates at every position.
"""

from foreword.errors import CheckpointError
from foreword.models.formats.fields import ConfigFields
from foreword.models.heads.files import HeadFiles, checked_shapes
from foreword.models.heads.names import all_layer_shapes, layer_ids, mask_token, sliding_window
from foreword.models.heads.published import build_head_spec, count_taps, read_body
from foreword.models.heads.spec import (
    CONFIDENCE,
    CONVOLUTIONS,
    MARKOV,
    SELECTOR,
    BlockConvolution,
    HeadSpec,
    Join,
    PathSelector,
    Shapes,
)

MAX_BLOCK = 64  # maximum block size: visibility within a block is a mask with one bit per row

_LOGIT_KEYS = ("final_logit_softcapping", "output_multiplier", "input_embedding_scale")
"""Config keys that change the computation. They are supported in heads with a selector."""


def read_dflash(files: HeadFiles) -> HeadSpec:
    """Return the description of a DFlash, DSpark or DFlash2 head."""
    fields, body = files.fields, read_body(files)
    nested = fields.section("dflash_config") or ConfigFields({}, fields.origin)
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
    convolution = _convolution(files, hidden)
    if convolution is not None:
        required |= _convolution_shapes(convolution, hidden, len(body.layers))
    selector = _selector(files, fields, nested)
    _refuse_logit_keys(body.fields, nested, selector is not None)
    if is_dspark and selector is not None:
        raise fields.unsupported("a head with a Markov head and a candidate selector")
    if selector is not None:
        required |= _selector_shapes(files, body.vocab, body.sizes["draft_vocab_size"], hidden)
    block_size = nested.count("block_size", fields.count("block_size", 16))
    if not 2 <= block_size <= MAX_BLOCK:
        raise fields.unsupported(f"a block of {block_size} (2 to {MAX_BLOCK} can be run)")
    classes = fields.get("architectures")
    # DeepSpec's DFlash heads have a DSpark class, too, and draft from the newest token's row.
    is_deepspec = isinstance(classes, list) and any("DSpark" in str(name) for name in classes)
    return build_head_spec(
        _kind(is_dspark, is_dflash2=convolution is not None or selector is not None),
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
        norm_output=is_dspark or selector is not None,  # confidence heads and selectors read such states
        window=window,
        convolution=convolution,
        selector=selector,
    )


def _kind(is_dspark: bool, is_dflash2: bool) -> str:
    if is_dflash2:
        return "dflash2"
    return "dspark" if is_dspark else "dflash"


def _convolution(files: HeadFiles, hidden: int) -> BlockConvolution | None:
    """Return the sizes of a DFlash2 head's convolutions, read from the first layer's tensors; None: it has none."""
    kernel = files.shapes.get(f"layers.0.{CONVOLUTIONS[0]}.base_kernel")
    projection = files.shapes.get(f"layers.0.{CONVOLUTIONS[0]}.kernel_projection.weight")
    if kernel is None or projection is None:
        return None
    taps = kernel[1] if len(kernel) == 3 else 0
    groups = (
        projection[0] // (2 * taps) if taps and projection else 0
    )  # number of generated weights per side and tap
    if not groups or hidden % groups:
        raise CheckpointError(
            f"{files.path}: a kernel_projection of shape {list(projection)} does not fit base_kernel {list(kernel)} "
            f"and {hidden} channels; get the head again"
        )
    return BlockConvolution(taps, hidden // groups)


def _convolution_shapes(convolution: BlockConvolution, hidden: int, layers: int) -> Shapes:
    rows = 2 * convolution.taps * hidden // convolution.group
    by_part = {"base_kernel": (2, convolution.taps, hidden), "kernel_projection.weight": (rows, hidden)}
    return {
        f"layers.{layer}.{module}.{part}": shape
        for layer in range(layers)
        for module in CONVOLUTIONS
        for part, shape in by_part.items()
    }


def _selector(files: HeadFiles, fields: ConfigFields, nested: ConfigFields) -> PathSelector | None:
    """Return the settings of a DFlash2 head's selector, which z-lab's configs nest; None: it has none."""
    if not any(name in files for name in SELECTOR):
        return None
    return PathSelector(
        candidates=nested.count("selector_top_k", fields.count("selector_top_k", 16)),
        logit_scale=nested.number("output_multiplier", 1.0),
        logit_cap=nested.optional_number("final_logit_softcapping"),
        embedding_scale=nested.number("input_embedding_scale", 1.0),
    )


def _selector_shapes(files: HeadFiles, vocab: int, draft_vocab: int, hidden: int) -> Shapes:
    predecessor, successor, projection = SELECTOR
    rank = (files.shapes.get(predecessor) or (0,))[-1]  # a scalar or missing tensor is refused by its shape
    return {predecessor: (vocab, rank), successor: (draft_vocab, rank), projection: (rank, hidden)}


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


def _refuse_logit_keys(inner: ConfigFields, nested: ConfigFields, has_selector: bool) -> None:
    """Raise `CheckpointError` for settings of logits or embeddings that are not read; a selector's are nested."""
    for key in _LOGIT_KEYS:
        if nested.get(key) is not None and not has_selector:
            raise inner.unsupported(f"a head with {key} and without a candidate selector")
        if inner.get(key) is not None and nested.get(key) is None:
            raise inner.unsupported(f"a head with {key} outside of dflash_config")
