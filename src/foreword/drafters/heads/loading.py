"""A head beside its target, ready to run."""

from dataclasses import dataclass

from foreword.backends.batch import MAX_DRAFT_NODES, Tap
from foreword.backends.interface import HeadRunner
from foreword.drafters.heads.vocabulary import DraftVocabulary
from foreword.drafters.resources import DrafterResources
from foreword.errors import RequestError
from foreword.kv.spec import RowSpec
from foreword.models.heads.opening import open_head
from foreword.models.heads.sharing import without_copies
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


def check_width(width: int) -> None:
    """Refuse a tree that is wider than a draft can be."""
    if not 1 <= width <= MAX_DRAFT_NODES:
        raise RequestError(f"tree_width must be in 1 .. {MAX_DRAFT_NODES}, not {width}")
