"""A head's tensors against what it should have, and a head against the target that it is to guess for."""

from dataclasses import replace

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.config import ModelConfig
from foreword.models.heads.files import HeadFiles
from foreword.models.heads.layouts.boundaries import spread_boundaries, usual_boundaries
from foreword.models.heads.spec import HeadSpec, Join, Shapes


def checked_shapes(files: HeadFiles, required: Shapes, optional: Shapes) -> dict[str, tuple[int, ...]]:
    """The tensors that are there, each of the right shape; a missing or surplus one is refused."""
    present = files.shapes
    expected = {**required, **optional}
    missing, surplus = sorted(required.keys() - present.keys()), sorted(present.keys() - expected.keys())
    for what, names in (("lacks", missing), ("has unknown", surplus)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{files.path} {what} tensor {names[0]}{more}: the head does not fit its own config; get it again"
            )
    for name, shape in present.items():
        if shape != expected[name]:
            raise CheckpointError(
                f"{files.path}: tensor {name} has shape {shape}, its config says {expected[name]}; get it again"
            )
    return present


def vocabulary_shapes(vocab: int, draft_vocab: int, hidden: int) -> tuple[Shapes, Shapes]:
    """Tensors of the two ends, (required, optional): a reduced vocabulary needs a table and an output of its own."""
    own = {"lm_head.weight": (draft_vocab, hidden), "d2t": (draft_vocab,)}
    rest = {"embed_tokens.weight": (vocab, hidden), "t2d": (vocab,)}
    return (own, rest) if draft_vocab < vocab else ({}, {**own, **rest})


def fitted(spec: HeadSpec, target: ModelConfig, origin: str) -> HeadSpec:
    """The head for this target, with the boundaries that it reads; refused if it was made for another."""
    _require(spec.target_hidden_size, target.hidden_size, "hidden size", origin)
    _require(spec.vocab_size, target.vocab_size, "vocabulary", origin)
    borrowed = [name for name in ("embed_tokens.weight", "lm_head.weight") if not spec.has(name)]
    if borrowed and spec.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{origin} lacks tensor {borrowed[0]} and cannot use the target's: it is {spec.hidden_size} wide and "
            f"the target {target.hidden_size}; get the head again"
        )
    boundaries = spec.boundaries
    if spec.reads_normed:
        boundaries = (target.num_layers,)
    elif boundaries is None and spec.join is Join.CONTEXT:
        boundaries = spread_boundaries(target.num_layers, spec.num_taps)
    elif boundaries is None:
        boundaries = usual_boundaries(target.num_layers)
        if spec.num_taps != len(boundaries):
            raise CheckpointError(
                f"{origin} reads {spec.num_taps} hidden states of the target and does not say which; "
                "put eagle_aux_hidden_state_layer_ids into its config.json"
            )
    wrong = [b for b in boundaries if not 0 <= b <= target.num_layers]
    if wrong:
        raise CheckpointError(
            f"{origin} reads the target behind layer {wrong[0]} and it has {target.num_layers}; use another head"
        )
    return replace(spec, boundaries=boundaries)


def _require(own: int, wanted: int, what: str, origin: str) -> None:
    if own != wanted:
        raise CheckpointError(
            f"{origin} was made for a {what} of {own} and this model's is {wanted}; use a head for this model"
        )


def draft_token_ids(spec: HeadSpec, files: HeadFiles) -> Tensor | None:
    """int64 [draft vocabulary], the target's id of every token that the head can guess; None: they are the same.

    The file has offsets: token i of the head is token i + d2t[i] of the target.
    """
    if "token_map" in files:  # vLLM's Medusa heads: the ids themselves
        ids: Tensor = files.stored("token_map").long()
    elif "d2t" in files:
        ids = torch.arange(spec.draft_vocab_size) + files.stored("d2t").long()
    else:
        return None
    in_range = int(ids.min()) >= 0 and int(ids.max()) < spec.vocab_size
    if not in_range or int(torch.bincount(ids).max()) > 1:
        raise CheckpointError(
            f"{files.path}: d2t or token_map leads outside the vocabulary of {spec.vocab_size} or twice to the same "
            "token; the file is damaged, get it again"
        )
    if "t2d" in files:
        kept = files.stored("t2d").bool()
        if int(kept.sum()) != len(ids) or not bool(kept[ids].all()):
            raise CheckpointError(f"{files.path}: d2t and t2d name different tokens; get the head again")
    is_whole = len(ids) == spec.vocab_size and bool((ids.diff() == 1).all())
    return None if is_whole else ids
