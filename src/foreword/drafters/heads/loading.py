"""A head beside its target, ready to run."""

from dataclasses import dataclass

import torch

from foreword.backends.batch import MAX_DRAFT_NODES, Tap
from foreword.backends.interface import HeadRunner
from foreword.drafters.heads.vocabulary import DraftVocabulary
from foreword.drafters.resources import DrafterResources
from foreword.errors import RequestError
from foreword.kv.spec import RowSpec
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.opening import Head, open_head
from foreword.models.sources.resolve import resolve_model


@dataclass(frozen=True)
class LoadedHead:
    """What a drafter with a head is made of."""

    runner: HeadRunner
    rows: RowSpec  # its KV rows in the target's pages
    taps: tuple[Tap, ...]  # the target's states that it reads
    vocabulary: DraftVocabulary


def load_head(model: str, kind: str, resources: DrafterResources) -> LoadedHead:
    """Open a head of this kind and load it beside the target; one that was made for another target is refused."""
    path = resolve_model(model)
    head = open_head(path).fitted(resources.target.config)
    if head.spec.kind != kind:
        raise RequestError(f"{path} holds a {head.spec.kind} head; use method {head.spec.kind!r}")
    head = without_copies(head, resources.checkpoint)
    spec = head.spec
    attention = spec.layers[0].attention
    # The name tells heads apart that an engine has side by side, and is the same whenever this one is loaded.
    rows = RowSpec(f"{kind}:{path.resolve()}", len(spec.layers), attention.num_kv_heads, attention.head_dim)
    taps = tuple(Tap(boundary, spec.reads_normed) for boundary in spec.boundaries or ())
    vocabulary = DraftVocabulary(head.token_ids, resources.vocab_size, resources.target.device)
    return LoadedHead(resources.target.head(head, rows.name), rows, taps, vocabulary)


def without_copies(head: Head, target: Checkpoint) -> Head:
    """Many files hold a copy of the target's embedding and output matrix: these are not loaded twice."""
    whole = head.spec.vocab_size == head.spec.draft_vocab_size and head.token_ids is None
    theirs = {"embed_tokens.weight": "model.embed_tokens.weight"}
    if whole:
        tied = "lm_head.weight" not in target.tensor_names()
        theirs["lm_head.weight"] = "model.embed_tokens.weight" if tied else "lm_head.weight"
    copies = [own for own, name in theirs.items() if head.spec.has(own) and _is_copy(head, own, target, name)]
    return head.without(copies) if copies else head


def _is_copy(head: Head, own: str, target: Checkpoint, name: str) -> bool:
    stored = head.files.stored(own)
    if not stored.dtype.is_floating_point or head.spec.hidden_size != head.spec.target_hidden_size:
        return False
    return torch.equal(stored, target.load(name, stored.dtype))


def check_width(width: int) -> None:
    """Refuse a tree that is wider than a draft can be."""
    if not 1 <= width <= MAX_DRAFT_NODES:
        raise RequestError(f"tree_width must be in 1 .. {MAX_DRAFT_NODES}, not {width}")
