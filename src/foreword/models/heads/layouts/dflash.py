"""DFlash heads (z-lab, SpecForge, DeepSpec, speculators): a block of draft tokens in one pass.

DSpark adds a small Markov head over the tokens of a block.
"""

from foreword.errors import CheckpointError
from foreword.models.formats.fields import ConfigFields
from foreword.models.heads.files import HeadFiles, checked_shapes, vocabulary_shapes
from foreword.models.heads.layouts.common import all_layer_shapes, layer_ids, mask_token, read_layers
from foreword.models.heads.layouts.eagle import count_taps, described, section
from foreword.models.heads.spec import CONFIDENCE, MARKOV, HeadSpec, Join, Shapes

MAX_BLOCK = 64
"""Maximum block size: rows of a block are visible by one bit each."""

_UNSUPPORTED = ("final_logit_softcapping", "output_multiplier", "input_embedding_scale")


def read_dflash(files: HeadFiles) -> HeadSpec:
    """Read the head's description."""
    fields, present = files.fields, files.shapes
    inner = section(fields, "transformer_layer_config") or fields
    nested = section(fields, "dflash_config") or ConfigFields({}, fields.origin)
    hidden, vocab = inner.count("hidden_size"), inner.count("vocab_size")
    target_hidden = fields.count("target_hidden_size", hidden)
    draft_vocab = fields.count("draft_vocab_size", vocab)
    layers = read_layers(inner, present)
    required, optional = vocabulary_shapes(vocab, draft_vocab, hidden)
    taps = count_taps(files, target_hidden)
    required = {**required, "fc.weight": (hidden, taps * target_hidden)}
    required |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    required |= all_layer_shapes(layers, hidden, first_inputs=hidden, first_norm=True)
    _refuse_variants(inner, nested)
    is_dspark = MARKOV[0] + ".weight" in present
    if is_dspark:
        markov, confidence = _dspark_shapes(files, vocab, draft_vocab, hidden)
        required, optional = {**required, **markov}, {**optional, **confidence}
    return described(
        "dspark" if is_dspark else "dflash",
        Join.CONTEXT,
        inner,
        layers,
        checked_shapes(files, required, optional),
        draft_vocab_size=draft_vocab,
        target_hidden_size=target_hidden,
        num_taps=taps,
        boundaries=_boundaries(fields, nested, taps),
        reads_normed=False,
        mask_token_id=mask_token(fields, vocab),
        block_size=_block_size(fields, nested),
        is_causal=nested.flag("causal", inner.flag("is_causal", False)),
        anchor_drafts=fields.flag("sample_from_anchor", is_dspark or _is_deepspec(fields)),
        norm_output=is_dspark,  # its confidence head reads normalised states
    )


def _dspark_shapes(files: HeadFiles, vocab: int, draft_vocab: int, hidden: int) -> tuple[Shapes, Shapes]:
    """Return (required, optional) tensors of the plain Markov head; gated and recurrent ones are refused."""
    before, after = (name + ".weight" for name in MARKOV)
    rank = files.shapes[before][-1]
    weight = CONFIDENCE + ".weight"
    width = files.shapes[weight][-1] if weight in files else hidden
    if width not in (hidden, hidden + rank):
        raise CheckpointError(f"{files.path}: {weight} reads {width} numbers; get the head again")
    required = {before: (vocab, rank), after: (draft_vocab, rank)}
    return required, {weight: (1, width), CONFIDENCE + ".bias": (1,)}


def _boundaries(fields: ConfigFields, nested: ConfigFields, taps: int) -> tuple[int, ...] | None:
    """Return the tapped layers: `target_layer_ids` are layers, speculators' ids count layers."""
    found = {
        ids
        for ids in (
            layer_ids(nested, "target_layer_ids", 1),
            layer_ids(fields, "target_layer_ids", 1),
            layer_ids(fields, "aux_hidden_state_layer_ids", 0),
        )
        if ids
    }
    if len(found) > 1 or any(len(ids) != taps for ids in found):
        raise CheckpointError(
            f"{fields.origin}: the layers that it names do not fit fc.weight, which reads {taps} hidden states; "
            "get the head again"
        )
    return found.pop() if found else None


def _block_size(fields: ConfigFields, nested: ConfigFields) -> int:
    size = nested.count("block_size", fields.count("block_size", 16))
    if not 2 <= size <= MAX_BLOCK:
        raise fields.unsupported(f"a block of {size} (2 to {MAX_BLOCK} can be run)")
    return size


def _is_deepspec(fields: ConfigFields) -> bool:
    named = fields.get("architectures")
    return isinstance(named, list) and any("DSpark" in str(name) for name in named)


def _refuse_variants(inner: ConfigFields, nested: ConfigFields) -> None:
    kinds = inner.get("layer_types") or []
    if nested.flag("use_swa", False) or "sliding_attention" in kinds:
        raise inner.unsupported("a DFlash head with a sliding window")
    for key in _UNSUPPORTED:
        if inner.get(key) is not None or nested.get(key) is not None:
            raise inner.unsupported(f"a DFlash head with {key}")
