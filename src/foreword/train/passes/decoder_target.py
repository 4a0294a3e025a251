"""Runs a target of any family over whole texts, with the decoder that the engine uses."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foreword.backends.batch import Tap
from foreword.backends.choice import choose_backend
from foreword.backends.loading import DecoderLoader
from foreword.backends.runner import ModelRunner
from foreword.backends.torch.decoder import DescribedDecoder
from foreword.engine.loader import LoadedModel
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.models.formats.checkpoint import Checkpoint
from foreword.speculation.draft import NO_DRAFT
from foreword.speculation.layout import BatchBuffers, SequenceRows
from foreword.train.passes.packing import PackedBatch
from foreword.train.passes.target import Features, FrozenTarget

_PASS_ROWS, _PASS_TEXTS = 8192, 32
"""Limits of a pass: rows (of activations), unless a single text is longer, and texts (of recurrent states)."""


class DecoderTarget(FrozenTarget):
    """A target of any family, whose hidden states are computed by passes of its decoder over whole texts."""

    def __init__(self, loaded: LoadedModel) -> None:
        decoder = loaded.decoder
        assert isinstance(decoder, DescribedDecoder)
        super().__init__(decoder.config, decoder.weights)
        self.loaded = loaded
        self._runner: ModelRunner | None = None
        self._pages = 0  # of the runner's KV store
        self._states = NO_STATES if self.config.recurrent is None else StateSizes(_PASS_TEXTS)

    @staticmethod
    def load(checkpoint: Checkpoint, device: torch.device) -> "DecoderTarget":
        """Load a target: on a GPU as for the engine, which can then write texts with it; on a CPU in float32."""
        on_cpu = device.type == "cpu"
        choice = choose_backend("torch" if on_cpu else "auto", "float32" if on_cpu else "auto", device)
        loader = DecoderLoader(choice, device)
        return DecoderTarget(LoadedModel(loader.load(checkpoint), checkpoint.tokenizer(), checkpoint, loader))

    @torch.no_grad()
    def features(self, batch: PackedBatch, taps: Sequence[int]) -> Features:
        """Return the hidden states of a batch at these taps; zeros for padding, which belongs to no document."""
        all_taps = (*map(Tap, taps), Tap(self.config.num_layers, normed=True))
        texts = [document.tokens.tolist() for document in batch.documents]
        passes = [self._pass(group, all_taps) for group in _groups(texts)]
        padding = len(batch.token_ids) - sum(map(len, texts))
        passes.append([torch.zeros(padding, self.config.hidden_size, device=self.device)] * len(all_taps))
        states = [torch.cat([part.to(self.dtype) for part in parts]) for parts in zip(*passes, strict=True)]
        return Features(tuple(states[:-1]), states[-1])

    def _pass(self, texts: list[list[int]], taps: tuple[Tap, ...]) -> list[Tensor]:
        """Return the states of these texts at the taps, [rows, hidden] each."""
        runner = self._runner_for(sum(-(-len(text) // PAGE_SIZE) for text in texts))
        cache = PagedCache(self._pages, states=self._states)
        rows = []
        for text in texts:
            kv = cache.open()
            cache.reserve(kv, len(text))
            cache.enter_chunk(kv, len(text))
            rows.append(SequenceRows(kv, text, len(text), NO_DRAFT, run_logits=0, wants_hidden=True))
        hidden = runner.forward(BatchBuffers(entries=0).lay_out(cache, rows, (), taps)).hidden
        return [hidden[tap] for tap in taps]

    def _runner_for(self, pages: int) -> ModelRunner:
        """Return a runner whose KV store has at least this many pages. All passes share it."""
        if self._runner is None or self._pages < pages:
            self._pages = max(pages, _PASS_ROWS // PAGE_SIZE + _PASS_TEXTS)
            decoder = self.loaded.decoder
            self._runner = ModelRunner.allocate(decoder, self._pages, PAGE_SIZE, states=self._states)
        return self._runner


def _groups(texts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Yield the texts of each pass, in order."""
    group: list[list[int]] = []
    for text in texts:
        if group and (len(group) == _PASS_TEXTS or sum(map(len, group)) + len(text) > _PASS_ROWS):
            yield group
            group = []
        group.append(text)
    if group:
        yield group
