"""Loads a head for its target, and determines the method of head files."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from foreword.backends.batch import Ints, Tap
from foreword.backends.interface import HeadRunner, RowsRunner
from foreword.drafters.names import OWN_METHODS
from foreword.drafters.registry import DrafterKind, DrafterResources, drawn_kind, tree_width
from foreword.errors import RequestError
from foreword.kernels.placement import placement_of
from foreword.kv.spec import RowSpec
from foreword.models.heads.files import HeadFiles
from foreword.models.heads.names import head_kind
from foreword.models.heads.opening import Head, open_head, with_output, without_copies
from foreword.models.heads.shipped import find_head
from foreword.models.heads.spec import CONFIDENCE, DRAFTER_TENSORS, HeadSpec
from foreword.models.sources.resolve import resolve_model
from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.drafting import Drafter, DraftSource, DraftTask, Traits
from foreword.speculation.settings import DrafterSettings, at_least, setting

Input = TypeVar("Input")


class DraftVocabulary:
    """Maps a head's logits to the target's vocabulary; tokens unknown to the head get probability 0."""

    def __init__(self, token_ids: Tensor | None, vocab_size: int, device: torch.device) -> None:
        """`token_ids` maps the head's tokens to the target's (None: identical); `vocab_size` ids can be sampled."""
        self.vocab_size = self._width = vocab_size
        self._buffer = torch.empty(0, device=device)  # result of `spread`, [rows, ids]
        self._ids: Tensor | None = None  # `token_ids` on the device
        self._masked: Tensor | None = None  # columns whose ids cannot be sampled
        self._tokens: list[int] | None = None  # `token_ids` as a list
        self.token_ids: Ints | None = None  # as an array on the host
        if token_ids is not None:
            self._ids, self._tokens = token_ids.to(device), token_ids.tolist()
            self.token_ids = token_ids.to("cpu", torch.int32).numpy()
            self._width = max(vocab_size, max(self._tokens) + 1)
            masked = torch.nonzero(token_ids >= vocab_size).flatten()
            self._masked = masked.to(device) if len(masked) else None

    def likeliest(self, logits: Tensor) -> list[int]:
        """Return the target's id of each row's largest logit, the first on ties; -1 if no logit is finite."""
        drawable = self._drawable(logits)
        if placement_of(drawable.device).is_host:
            # With NumPy, since this code runs for every level, and torch calls take ten times as long.
            rows = drawable.numpy()
            columns = rows.argmax(axis=1).tolist()
            highest = [float(row[column]) for row, column in zip(rows, columns, strict=True)]
        else:
            values, indices = drawable.max(dim=1)
            columns, highest = indices.tolist(), values.tolist()
        tokens = columns if self._tokens is None else [self._tokens[column] for column in columns]
        return [token if math.isfinite(value) else -1 for token, value in zip(tokens, highest, strict=True)]

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits by draft id as logits by target id, [rows, ids], in a buffer that the next call overwrites."""
        drawable = self._drawable(logits)
        if self._ids is None:
            return drawable
        # Every call writes the same columns. The other columns are filled with -inf once.
        if len(self._buffer) < len(drawable):
            self._buffer = drawable.new_full((len(drawable), self._width), -torch.inf)
        buffer, ids = self._buffer[: len(drawable)], self._ids.expand(len(drawable), -1)
        return buffer.scatter_(1, ids, drawable)[:, : self.vocab_size]

    def _drawable(self, logits: Tensor) -> Tensor:
        """Return the logits with -inf for ids that cannot be sampled, or without them."""
        if self._ids is None:
            return logits[:, : self.vocab_size]
        return logits if self._masked is None else logits.index_fill(1, self._masked, -torch.inf)


HEAD = Traits(DraftSource.HEAD, needs_target="it reads the hidden states of the target's pass")
"""Traits of heads that draft all tokens in one pass."""

HEAD_BY_LEVEL = replace(HEAD, drafts_by_level=True)  # traits of heads that draft token by token


@dataclass(frozen=True)
class HeadConfig(DrafterSettings):
    """Settings of a head."""

    model: str = setting("", "head: a local path or a hub id; empty: the head shipped for the target")
    tree_width: int = tree_width()


@dataclass(frozen=True)
class WindowedHeadConfig(HeadConfig):
    """Settings of a head with KV rows."""

    window: int = setting(
        0,
        "newest positions that the head attends to; 0: the window in its config.json, or all",
        at_least(0),
    )


@dataclass(frozen=True)
class LoadedRows:
    """A loaded network that keeps KV rows in the target's pages."""

    runner: RowsRunner
    rows: RowSpec  # its rows in the target's pages
    taps: tuple[Tap, ...]  # hidden states that it reads
    vocabulary: DraftVocabulary
    record: str = ""  # name under which filled rows are recorded; empty: that of `rows`
    window: int | None = None  # newest positions that a draft attends to; None: all


@dataclass(frozen=True)
class LoadedHead(LoadedRows):
    """A loaded head with its own description and weights."""

    runner: HeadRunner
    # Float32 tensors by name that the drafter reads; the runner reads all others.
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    acceptance_by_level: tuple[float, ...] = ()  # published with the head; empty: unknown

    @property
    def spec(self) -> HeadSpec:
        return self.runner.spec


def load_head(config: WindowedHeadConfig, kind: str, resources: DrafterResources) -> LoadedHead:
    """Load a head of this kind for the target; refuse one trained for another target."""
    path = head_path(config.model, kind, resources)
    head = open_fitting(path, kind, resources, is_inside=kind == "mtp" and not config.model)
    spec = head.spec
    # The name of the rows must be stable, and differ between the heads of an engine.
    heads, key_size, value_size = spec.layers[0].attention.kv_row_sizes
    own_rows = RowSpec(f"{kind}:{path.resolve()}", len(spec.layers), heads, key_size, value_size)
    rows, record = resources.spare_rows.place(own_rows)
    names = [name for name in spec.shapes if name in DRAFTER_TENSORS or name.startswith(CONFIDENCE)]
    tensors = {name: head.load(name).to(resources.target.device) for name in names}
    return LoadedHead(
        resources.target.heads.head(head, rows.name),
        rows,
        taps_of(spec),
        vocabulary_of(head, resources),
        record,
        window=config.window or spec.window,
        tensors=tensors,
        acceptance_by_level=head.acceptance_by_level,
    )


def head_drafter_kind(
    method: str, summary: str, drafter: Callable[[LoadedHead, int], Drafter]
) -> DrafterKind:
    """Return the registry entry of a class of heads, which are created from a loaded head and a tree width."""

    def build(config: WindowedHeadConfig, resources: DrafterResources) -> Drafter:
        return drafter(load_head(config, method, resources), config.tree_width)

    return drawn_kind(drafter, summary, WindowedHeadConfig, build)


def draft_where_ready(
    tasks: Sequence[DraftTask],
    inputs: Sequence[Input | None],
    draft: Callable[[list[DraftTask], list[Input]], Sequence[Draft]],
) -> list[Draft]:
    """Call `draft` once for the tasks that have an input; return empty drafts for the others."""
    values = [value for value in inputs if value is not None]
    if len(values) == len(tasks):
        return list(draft(list(tasks), values)) if tasks else []
    drafts = [NO_DRAFT] * len(tasks)
    ready = [index for index, value in enumerate(inputs) if value is not None]
    if ready:
        new_drafts = draft([tasks[index] for index in ready], values)
        for index, new_draft in zip(ready, new_drafts, strict=True):
            drafts[index] = new_draft
    return drafts


def head_path(model: str, kind: str, resources: DrafterResources) -> Path:
    """Return a head's path. An empty `model` means the target's own files for MTP, otherwise the shipped head."""
    if model:
        return resolve_model(model)
    if kind == "mtp":
        path = resources.checkpoint.path
        if path.is_file():
            raise RequestError(
                f"{path} holds no mtp head: one file has the decoder alone; use the model's own directory"
            )
        return path
    shipped = find_head(resources.checkpoint, resources.checkpoint.tokenizer())
    if shipped is not None and shipped.method == kind:
        return shipped.path
    available = "no head" if shipped is None else f"the {shipped.method} head {shipped.name}"
    raise RequestError(
        f"speculation: {kind} needs a head, and {available} ships with foreword for this model: "
        'give a path or hub id as "model", or train a head (foreword train --help)'
    )


def open_fitting(path: Path, kind: str, resources: DrafterResources, is_inside: bool = False) -> Head:
    """Open a head of this kind and check that it fits the target; with `is_inside`, it is in the target's files."""
    head = open_head(path, kind if is_inside else None)
    if head.spec.kind != kind:
        raise RequestError(f"{path} is a head for method {head.spec.kind!r}; name that one, or none")
    head = without_copies(head.fitted(resources.target.config), resources.checkpoint)
    return with_output(head, resources.checkpoint)


def taps_of(spec: HeadSpec) -> tuple[Tap, ...]:
    """Return the hidden states that a head reads."""
    return tuple(Tap(boundary, spec.reads_normed) for boundary in spec.boundaries or ())


def vocabulary_of(head: Head, resources: DrafterResources) -> DraftVocabulary:
    return DraftVocabulary(head.token_ids, resources.vocab_size, resources.target.device)


def method_of(model: str) -> str:
    """Return the method that runs these files: the method of the head that they contain, otherwise draft_model."""
    path = resolve_model(model)
    if path.suffix == ".gguf":
        return "draft_model"
    kind = head_kind(HeadFiles(path).shapes)
    if kind is not None and kind not in OWN_METHODS:
        raise RequestError(f"speculation: {path} holds a {kind} head, and there is no method that runs it")
    return kind or "draft_model"
