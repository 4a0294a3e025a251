"""Drafts with a decoder that has its own KV cache: `draft_model`, and the base class of similar methods."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from foreword.acceptance.transfer import started
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.drafters.model.levels import LevelDrafter, TextRows
from foreword.drafters.model.vocabularies import SharedTokens, shared_tokens
from foreword.drafters.registry import DrafterResources, drawn_kind, tree_width
from foreword.drafters.trees import GrowingTree
from foreword.errors import RequestError
from foreword.kv.block_pool import OutOfPages
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.sequence import KvSequence
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.sources.resolve import resolve_model
from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.drafting import DraftRequest, DraftSource, DraftTask, Traits
from foreword.speculation.layout import SequenceRows
from foreword.speculation.proposing import fair_shares
from foreword.speculation.settings import REQUIRED, DrafterSettings, setting


@dataclass(frozen=True)
class DraftingSize:
    """Draft width and KV cache size of a drafting decoder."""

    tree_width: int = 1  # nodes per level; 1 is a chain
    kv_tokens: int = 32_768  # capacity of its KV cache, over all requests
    rows_per_pass: int = 256  # tokens per catch-up pass; longer texts take several passes


class AutoregressiveDrafter(LevelDrafter):
    """Drafts with a decoder that has a KV cache of its own.

    `propose` first processes the tokens committed since the last call, in one pass of limited size. A request with a
    long prompt therefore delays no other request, and has no draft until its whole prompt is processed. A prefix that
    several requests of a tenant share is processed once.
    """

    traits = Traits(DraftSource.MODEL, drafts_by_level=True)

    def __init__(
        self,
        decoder: Decoder,
        vocab_size: int,
        size: DraftingSize,
        weight_bytes: int = 0,
        shared: SharedTokens | None = None,
    ) -> None:
        """Create a drafter that samples only the target's `vocab_size` ids, over which q is computed.

        Dropping other tokens after sampling would bias the rules *token* and *block*. `weight_bytes` counts weights
        that the decoder does not share with the target. `shared` translates ids for a decoder with another tokenizer.
        """
        if decoder.config.recurrent is not None:
            raise RequestError(
                "a draft model with recurrent layers is not supported yet; use ngram, suffix or a head instead"
            )
        super().__init__(size.tree_width)
        self._weight_bytes = weight_bytes
        self._size = size
        self._cache = PagedCache(-(-size.kv_tokens // PAGE_SIZE), prefix_caching=True)
        self._sequences: dict[int, tuple[int, KvSequence]] = {}  # request id -> (epoch, KV sequence)
        self._shared = shared
        sampled = None if shared else vocab_size
        self._runner = ModelRunner.allocate(
            decoder, self._cache.pool.num_pages, PAGE_SIZE, vocab_size=sampled
        )

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return a chain, or a tree of `tree_width`, per task; empty if its KV cache is full."""
        growing = {
            index: GrowingTree(task, self._width) for index, task in enumerate(tasks) if self._reserve(task)
        }
        trees = list(growing.values())
        try:
            if trees:
                self._draft(trees)
        finally:
            for tree in trees:
                self._cache.rollback(self._kv(tree.request))
        return [growing[index].draft() if index in growing else NO_DRAFT for index in range(len(tasks))]

    def forget(self, request: DraftRequest) -> None:
        entry = self._sequences.pop(request.request_id, None)
        if entry is not None:
            self._cache.close(entry[1])

    def memory_bytes(self) -> int:
        """Return the bytes of its own weights and of the full KV cache."""
        kv = self._cache.pool.num_pages * PAGE_SIZE * self._runner.store.bytes_per_row
        return self._weight_bytes + kv

    def check_integrity(self) -> None:
        self._cache.check_integrity()

    def _reserve(self, task: DraftTask) -> bool:
        """Reserve rows for the text and the draft; return False if no draft is requested or no pages are free.

        First, rows that are no longer valid are dropped, and a new request gets a KV sequence.
        """
        request = task.request
        epoch, kv = self._sequences.get(request.request_id, (request.epoch, None))
        if kv is not None and epoch != request.epoch:
            self.forget(request)
            kv = None
        if kv is None:
            kv = self._cache.open(request.tenant, request.tokens)
            self._sequences[request.request_id] = (request.epoch, kv)
        # The newest token is always computed again, since its logits are needed.
        self._cache.rewind(kv, len(request.tokens) - 1)
        if task.max_nodes < 1 or task.max_depth < 1:
            return False
        try:
            self._cache.reserve(kv, len(request.tokens) - kv.computed + task.max_nodes)
        except OutOfPages:
            return False
        return True

    def _kv(self, request: DraftRequest) -> KvSequence:
        return self._sequences[request.request_id][1]

    def _rows_of(self, request: DraftRequest) -> TextRows:
        return TextRows(self._kv(request))

    def _draft(self, trees: Sequence[GrowingTree]) -> None:
        """Process committed tokens, then draft all trees whose text is completely processed."""
        began = started(self._runner.decoder.device)
        trees, logits = self._catch_up(trees)
        if trees:
            self._grow(trees, logits, self._cache, began)

    def _catch_up(self, trees: Sequence[GrowingTree]) -> tuple[list[GrowingTree], Tensor]:
        """Process committed tokens in one pass; return the trees without missing tokens, and their logits."""
        missing_rows = [len(tree.request.tokens) - 1 - self._kv(tree.request).computed for tree in trees]
        # Short texts first: a long text must not delay the drafts of other requests.
        shares = fair_shares(missing_rows, self._size.rows_per_pass)
        rows: list[SequenceRows] = []
        ready: list[GrowingTree] = []
        for tree, missing, share in zip(trees, missing_rows, shares, strict=True):
            kv, tokens = self._kv(tree.request), tree.request.tokens
            if share == missing:  # the newest token follows in the same pass
                ready.append(tree)
                rows.append(SequenceRows(kv, tokens, share + 1, Draft()))
            elif share > 0:
                rows.append(SequenceRows(kv, tokens, share, Draft(), run_logits=0))
        logits = self._run(trees, rows, self._cache)
        for sequence in rows:
            newest = sequence.run_logits  # 1 if the pass had the newest token, otherwise 0
            self._cache.advance(sequence.kv, sequence.run - newest)
            # Pages are published before the newest token's row counts as computed, since that row is computed again.
            if sequence.kv.computed // PAGE_SIZE > sequence.kv.published:
                self._cache.publish(sequence.kv, sequence.tokens[:-1])
            self._cache.advance(sequence.kv, newest)
        return ready, logits

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        shared = self._shared
        if shared is None:
            return self._runner.forward(batch)
        output = self._runner.forward(shared.to_draft_ids(batch))
        return replace(output, logits=shared.to_target(output.logits))


@dataclass(frozen=True)
class DraftModelConfig(DrafterSettings):
    """Settings of a draft model."""

    model: str = setting(REQUIRED, "a built-in name, a local path or a hub id")
    tree_width: int = tree_width()


def build_draft_model(config: DraftModelConfig, resources: DrafterResources) -> AutoregressiveDrafter:
    """Load the draft model. With another tokenizer, it drafts only tokens that both vocabularies have."""
    checkpoint = open_checkpoint(Path(resolve_model(config.model)))
    device = resources.target.device
    shared = shared_tokens(resources.checkpoint, checkpoint, resources.vocab_size, device)
    decoder, size = resources.load_decoder(checkpoint), DraftingSize(config.tree_width)
    return AutoregressiveDrafter(decoder, resources.vocab_size, size, decoder.weight_bytes, shared)


def build_on_node(
    config: DraftModelConfig, resources: DrafterResources, kv_tokens: int
) -> AutoregressiveDrafter:
    """Create a drafter with a draft node's own model and a KV cache of `kv_tokens` tokens."""
    size, decoder = DraftingSize(config.tree_width, kv_tokens), resources.target
    return AutoregressiveDrafter(decoder, resources.vocab_size, size, decoder.weight_bytes)


DRAFT_MODEL = drawn_kind(
    AutoregressiveDrafter,
    "a smaller model; best with the target's tokenizer",
    DraftModelConfig,
    build_draft_model,
    build_on_node=build_on_node,
)
