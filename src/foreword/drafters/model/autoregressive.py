"""Drafts with a decoder that has a KV cache of its own: all model-based drafters, and `draft_model` itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foreword.acceptance.transfer import HostCopy, started
from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.drafters.next_level import draw_unread, grow_chains, grow_trees, is_drawn_unread
from foreword.drafters.registry import DrafterResources, drawn_kind
from foreword.drafters.trees import GrowingTree
from foreword.errors import RequestError
from foreword.kv.block_pool import OutOfPages
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.sequence import KvSequence
from foreword.models.formats.checkpoint import Checkpoint, open_checkpoint
from foreword.models.sources.resolve import resolve_model
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftSource, DraftTask, Traits
from foreword.speculation.layout import BatchBuffers, SequenceRows
from foreword.speculation.proposing import fair_shares


@dataclass(frozen=True)
class DraftingSize:
    """How much a decoder drafts and remembers."""

    tree_width: int = 1  # nodes on every level; 1 is a chain
    kv_tokens: int = 32_768  # tokens of all requests that its own KV cache holds
    rows_per_pass: int = 256  # tokens that it reads in one call to catch up; longer texts take several

    def __post_init__(self) -> None:
        if not 1 <= self.tree_width <= MAX_DRAFT_NODES:
            raise RequestError(f"tree_width must be in 1 .. {MAX_DRAFT_NODES}, not {self.tree_width}")


class AutoregressiveDrafter(Drafter):
    """Drafts with a decoder in a KV cache of its own, which may lag the requests.

    `propose` first feeds it what was committed since it was last asked, so that it can be left out for a
    while, or see a request late, and still be right. It never reads more in one call than one pass takes, so
    that a long prompt delays no other request: until it has caught up, it returns no draft for that one.
    Equal beginnings of a tenant's texts are read once.
    """

    traits = Traits(DraftSource.MODEL, drafts_by_level=True)

    def __init__(self, decoder: Decoder, vocab_size: int, size: DraftingSize, weight_bytes: int = 0) -> None:
        """`vocab_size` is the target's: no other id is drawn, and q is over exactly these.

        A draft token that is dropped because of what was drawn would bias *token* and *block*.
        `weight_bytes` is the memory of weights that the decoder does not share with the target.
        """
        self._weight_bytes = weight_bytes
        self._size = size
        self._cache = PagedCache(-(-size.kv_tokens // PAGE_SIZE), prefix_caching=True)
        self._buffers = BatchBuffers()
        self._known: dict[int, tuple[int, KvSequence]] = {}  # request -> (epoch, its KV here)
        self._runner = ModelRunner.allocate(
            decoder, self._cache.pool.num_pages, PAGE_SIZE, vocab_size=vocab_size
        )

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """A chain, or a tree of `tree_width`, for every ask; none where its own KV cache is full."""
        width = self._size.tree_width
        growing = {index: GrowingTree(task, width) for index, task in enumerate(tasks) if self._reserve(task)}
        trees = list(growing.values())
        try:
            if trees:
                self._write(trees)
        finally:
            for tree in trees:
                self._cache.rollback(self._kv(tree.request))
        return [growing[index].draft() if index in growing else Draft() for index in range(len(tasks))]

    def forget(self, request: DraftRequest) -> None:
        """Give back the KV of a request that has ended."""
        known = self._known.pop(request.request_id, None)
        if known is not None:
            self._cache.close(known[1])

    def memory_bytes(self) -> int:
        """What drafting adds: weights of its own, and the KV cache when it is full."""
        kv = self._cache.pool.num_pages * PAGE_SIZE * self._runner.store.bytes_per_row
        return self._weight_bytes + kv

    def check_integrity(self) -> None:
        """Raise `AssertionError` if its KV bookkeeping contradicts itself."""
        self._cache.check_integrity()

    def _reserve(self, task: DraftTask) -> bool:
        """Reserve rows for the text and the draft; what no longer belongs to it is dropped."""
        request = task.request
        epoch, kv = self._known.get(request.request_id, (request.epoch, None))
        if kv is not None and epoch != request.epoch:
            self.forget(request)
            kv = None
        if kv is None:
            kv = self._cache.open(request.tenant, request.tokens)
            self._known[request.request_id] = (request.epoch, kv)
        self._cache.rewind(kv, len(request.tokens) - 1)  # the newest token's logits are always needed
        if task.max_nodes < 1 or task.max_depth < 1:
            return False
        try:
            self._cache.reserve(kv, len(request.tokens) - kv.computed + task.max_nodes)
        except OutOfPages:
            return False
        return True

    def _kv(self, request: DraftRequest) -> KvSequence:
        return self._known[request.request_id][1]

    def _write(self, trees: Sequence[GrowingTree]) -> None:
        began = started(self._runner.decoder.device)
        trees, logits = self._catch_up(trees)
        if not trees:
            return
        if self._size.tree_width == 1 and all(map(is_drawn_unread, trees)):
            self._write_unread(trees, logits, began)
            return
        while trees:
            if self._size.tree_width == 1:
                grow_chains(trees, logits)
            else:
                grow_trees(trees, logits)
            trees = [tree for tree in trees if not tree.is_done]
            if trees:
                logits = self._run(trees, [self._newest_level(tree) for tree in trees])

    def _write_unread(
        self, trees: Sequence[GrowingTree], logits: Tensor, began: "torch.cuda.Event | None"
    ) -> None:
        """Draw chains whose tokens are read when all are drawn: between levels the host does not wait."""
        chains, levels = trees, []
        while trees:
            levels.append(draw_unread(trees, logits))
            for row, tree in enumerate(trees):
                # The id stands for what the row draws.
                tree.grow([(0.0, tree.frontier[0], -1 - row, None)])
            going_on = [tree for tree in trees if not tree.is_done]
            if going_on:
                rows = [self._newest_level(tree) for tree in going_on]
                logits = self._run(going_on, rows, levels[-1])
            trees = going_on
        places: dict[GrowingTree, list[int]] = {tree: [] for tree in chains}
        source, count = HostCopy.begin(torch.cat(levels), began), 0
        source.is_cold = any(tree.is_cold for tree in chains)
        for level in range(len(levels)):
            for tree in chains:
                if tree.depth > level:
                    places[tree].append(count)
                    count += 1
        for tree, its in places.items():
            tree.stand_for(source, its)

    def _catch_up(self, trees: Sequence[GrowingTree]) -> tuple[list[GrowingTree], Tensor]:
        """Read committed tokens of many requests in one pass; returns who has read all, with what may follow."""
        missing_rows = [len(tree.request.tokens) - 1 - self._kv(tree.request).computed for tree in trees]
        # Those with little first: a long text must not delay the drafts of others.
        shares = fair_shares(missing_rows, self._size.rows_per_pass)
        rows, ready = [], []
        for tree, missing, share in zip(trees, missing_rows, shares, strict=True):
            kv, tokens = self._kv(tree.request), tree.request.tokens
            if share == missing:
                ready.append(tree)
                rows.append(SequenceRows(kv, tokens, share + 1, Draft()))
            elif share > 0:
                rows.append(SequenceRows(kv, tokens, share, Draft(), run_logits=0))
        logits = self._run(trees, rows)
        for part in rows:
            newest = part.run_logits
            self._cache.advance(part.kv, part.run - newest)
            self._publish(part.kv, part.tokens)
            self._cache.advance(part.kv, newest)
        return ready, logits

    def _publish(self, kv: KvSequence, tokens: Sequence[int]) -> None:
        """Let other requests start with the full pages; the newest token's row is computed again and stays out."""
        if kv.computed // PAGE_SIZE > kv.published:
            self._cache.publish(kv, tokens[:-1])

    def _newest_level(self, tree: GrowingTree) -> SequenceRows:
        return SequenceRows(self._kv(tree.request), tree.request.tokens, 0, tree.draft(), tree.frontier[0])

    def _run(
        self, trees: Sequence[GrowingTree], rows: Sequence[SequenceRows], drawn_before: Tensor | None = None
    ) -> Tensor:
        """Return the logits of a pass over `rows`, which the trees wait for."""
        batch = self._buffers.lay_out(self._cache, rows, ())
        output = self._runner.forward(replace(batch, drawn_before=drawn_before))
        for tree in trees:
            tree.is_cold |= output.is_cold
        return output.logits


@dataclass(frozen=True)
class DraftModelConfig:
    """Which model drafts."""

    model: str  # a built-in name, a local path or a hub id
    tree_width: int = 1  # nodes on every level of the draft; 1 is a chain


def build_draft_model(config: DraftModelConfig, resources: DrafterResources) -> AutoregressiveDrafter:
    """Load the draft model beside the target; its tokens must mean the same."""
    checkpoint = open_checkpoint(Path(resolve_model(config.model)))
    check_same_vocabulary(resources.checkpoint, checkpoint)
    decoder = resources.load_decoder(checkpoint)
    size = DraftingSize(config.tree_width)
    return AutoregressiveDrafter(decoder, resources.vocab_size, size, decoder.weight_bytes)


def build_on_node(
    config: DraftModelConfig, resources: DrafterResources, kv_tokens: int
) -> AutoregressiveDrafter:
    """Draft with the loaded model itself, in a KV cache of this many tokens."""
    size, decoder = DraftingSize(config.tree_width, kv_tokens), resources.target
    return AutoregressiveDrafter(decoder, resources.vocab_size, size, decoder.weight_bytes)


def check_same_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Refuse a draft model whose token ids are not the target's. One of them may have some more at the end."""
    ours, theirs = target.tokenizer(), draft.tokenizer()
    for token in range(min(ours.vocab_size, theirs.vocab_size)):
        if ours.token_bytes(token, skip_special_tokens=False) != theirs.token_bytes(
            token, skip_special_tokens=False
        ):
            raise RequestError(
                f"token {token} of draft model {draft.path} is not the target's token {token}; "
                "use a draft model with the target's tokenizer"
            )


DRAFT_MODEL = drawn_kind(
    "a smaller model with the same tokenizer",
    DraftModelConfig,
    build_draft_model,
    traits=AutoregressiveDrafter.traits,
    build_on_node=build_on_node,
)
