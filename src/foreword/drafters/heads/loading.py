"""A head beside its target, ready to run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from foreword.backends.batch import MAX_DRAFT_NODES, Tap
from foreword.backends.interface import HeadRunner, RowsRunner
from foreword.drafters.heads.vocabulary import DraftVocabulary
from foreword.drafters.resources import DrafterResources
from foreword.errors import RequestError
from foreword.kv.spec import RowSpec
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.opening import Head, open_head, without_copies
from foreword.models.heads.shipped import find_head
from foreword.models.heads.spec import CONFIDENCE, DRAFTERS_OWN, HeadSpec
from foreword.models.sources.resolve import resolve_model
from foreword.speculation.drafting import DraftSource, Traits

HEAD = Traits(DraftSource.HEAD, needs_target="it reads the hidden states of the target's pass")
"""What all heads declare."""

HEAD_BY_LEVEL = replace(HEAD, drafts_by_level=True)
"""And those that draft token by token."""


@dataclass(frozen=True)
class HeadConfig:
    """Which head guesses."""

    model: str = ""  # a local path or a hub id; empty: the head shipped for the target
    tree_width: int = 1  # candidates that are followed on every level of the draft; 1 is a chain

    def __post_init__(self) -> None:
        check_width(self.tree_width)


@dataclass(frozen=True)
class LoadedRows:
    """What a drafter with KV rows in the target's pages is made of."""

    runner: RowsRunner
    rows: RowSpec  # its KV rows in the target's pages
    taps: tuple[Tap, ...]  # the target's states that it reads
    vocabulary: DraftVocabulary


@dataclass(frozen=True)
class LoadedHead(LoadedRows):
    """What a drafter with a head is made of."""

    runner: HeadRunner
    own: Mapping[str, Tensor] = field(default_factory=dict)  # what the drafter reads itself, in float32
    acceptance_by_level: tuple[float, ...] = ()  # as measured when it was made; empty: nobody knows

    @property
    def spec(self) -> HeadSpec:
        return self.runner.spec


def load_head(model: str, kind: str, resources: DrafterResources) -> LoadedHead:
    """Open a head of this kind and load it beside the target; refuse one made for another target."""
    path = head_path(model, kind, resources)
    head = open_fitting(path, kind, resources, is_inside=kind == "mtp" and not model)
    spec = head.spec
    # The name tells heads apart that an engine has side by side, and is the same whenever this one is loaded.
    rows = RowSpec(f"{kind}:{path.resolve()}", len(spec.layers), *spec.layers[0].attention.kept)
    names = [name for name in spec.shapes if name in DRAFTERS_OWN or name.startswith(CONFIDENCE)]
    own = {name: head.load(name).to(resources.target.device) for name in names}
    return LoadedHead(
        resources.target.heads.head(head, rows.name),
        rows,
        taps_of(spec),
        vocabulary_of(head, resources),
        own,
        head.acceptance_by_level,
    )


def head_path(model: str, kind: str, resources: DrafterResources) -> Path:
    """Return the files of a head. An empty `model` means the target's own files for MTP, else the shipped head."""
    if model:
        return resolve_model(model)
    if kind == "mtp":
        return _own_files(resources.checkpoint)
    shipped = find_head(resources.checkpoint, resources.checkpoint.tokenizer())
    if shipped is not None and shipped.method == kind:
        return shipped.path
    there = "no head" if shipped is None else f"the {shipped.method} head {shipped.name}"
    raise RequestError(
        f"speculation: {kind} needs a head, and {there} ships with foreword for this model: "
        'give a path or hub id as "model", or train a head (foreword train --help)'
    )


def _own_files(checkpoint: Checkpoint) -> Path:
    if checkpoint.path.is_file():
        raise RequestError(
            f"{checkpoint.path} holds no mtp head: one file has the decoder alone; use the model's own directory"
        )
    return checkpoint.path


def open_fitting(path: Path, kind: str, resources: DrafterResources, is_inside: bool = False) -> Head:
    """A head of this kind that was made for this target; it may be inside of the target's own files."""
    head = open_head(path, kind if is_inside else None)
    if head.spec.kind != kind:
        raise RequestError(f"{path} is a head for method {head.spec.kind!r}; name that one, or none")
    return without_copies(head.fitted(resources.target.config), resources.checkpoint)


def taps_of(spec: HeadSpec) -> tuple[Tap, ...]:
    return tuple(Tap(boundary, spec.reads_normed) for boundary in spec.boundaries or ())


def vocabulary_of(head: Head, resources: DrafterResources) -> DraftVocabulary:
    return DraftVocabulary(head.token_ids, resources.vocab_size, resources.target.device)


def check_width(width: int) -> None:
    """Refuse a tree that is wider than a draft can be."""
    if not 1 <= width <= MAX_DRAFT_NODES:
        raise RequestError(f"tree_width must be in 1 .. {MAX_DRAFT_NODES}, not {width}")
