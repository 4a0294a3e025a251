"""Batches of fixed size: concatenated texts, and the rows that predict answers.

The slot at row i holds token i + 1 and the target's state at i; it predicts token i + 2. A head needs the key and value
of every slot. It drafts only in the tail of a text, which begins with the slot that predicts the answer's first token.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.errors import RequestError
from foreword.train.passes.attention import Spans, to_device
from foreword.train.texts.documents import Document


@dataclass(frozen=True)
class BatchSize:
    """Rows of a batch, in total and in tails; unused rows are padded with a text of weight zero."""

    rows: int
    tails: int


@dataclass(frozen=True)
class PackedBatch:
    """A batch on the device."""

    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    is_answer: Tensor  # bool [rows]
    texts: Spans  # of the rows
    tails: Spans  # of the tail rows
    tail_rows: Tensor  # int64 [tails], index among the rows
    text_ends: Tensor  # int64 [tails], one past the last row of its text
    num_answer_tokens: int
    documents: tuple[Document, ...]

    def predicted(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the right draft token `step` of each tail row, and whether it is part of an answer."""
        rows = self.tail_rows + step + 2
        inside = rows < self.text_ends
        rows = rows.clamp(max=len(self.token_ids) - 1)
        return self.token_ids[rows], inside & self.is_answer[rows]

    def held(self, step: int) -> Tensor:
        """Return the token that each tail row's slot holds at a step."""
        return self.token_ids[(self.tail_rows + step + 1).clamp(max=len(self.token_ids) - 1)]


def tail_begin(document: Document) -> int:
    """Return the first slot that predicts an answer token."""
    return max(document.answer_begin - 2, 0)


def fitting_size(documents: Sequence[Document], rows: int, multiple: int = 256) -> BatchSize:
    """Return a batch size whose share of tail rows is that of these documents."""
    total = sum(len(document.tokens) for document in documents)
    tails = sum(len(document.tokens) - tail_begin(document) for document in documents)
    share = max(1, round(rows * tails / max(total, 1) / multiple)) * multiple
    return BatchSize(rows, min(share, rows - rows // 64 - 1))


def exact_size(documents: Sequence[Document]) -> BatchSize:
    """Return the size of a batch filled exactly by these documents."""
    rows = sum(len(document.tokens) for document in documents)
    return BatchSize(rows, rows - sum(tail_begin(document) for document in documents))


def sample_batch(documents: Sequence[Document], device: torch.device, count: int = 64) -> PackedBatch:
    """Return a batch of the first `count` documents."""
    sample = documents[:count]
    return pack(sample, exact_size(sample), device)


def require_fitting(documents: Sequence[Document], size: BatchSize) -> None:
    """Raise `RequestError` if no document fits."""
    if next(grouped(documents, size), None) is None:
        shortest = min(len(document.tokens) for document in documents)
        raise RequestError(
            f"no text fits into a step of {size.rows} tokens, the shortest has {shortest}; give more --batch-tokens"
        )


def batches(
    documents: Sequence[Document], size: BatchSize, seed: Sequence[int], device: torch.device, skip: int = 0
) -> Iterator[tuple[int, PackedBatch]]:
    """Yield numbered batches forever, each epoch in another seeded order; skip the first `skip`.

    All epochs have the same batches, so that the target's states can be cached by number.
    """
    require_fitting(documents, size)
    order = np.random.default_rng((*seed, 0)).permutation(len(documents)).tolist()
    groups = list(grouped([documents[number] for number in order], size))
    numbers = range(len(groups))
    for epoch in itertools.count(1):
        for number in numbers[skip:]:
            yield number, pack(groups[number], size, device)
        skip = max(skip - len(groups), 0)
        numbers = np.random.default_rng((*seed, epoch)).permutation(len(groups)).tolist()


def grouped(documents: Sequence[Document], size: BatchSize, look_ahead: int = 48) -> Iterator[list[Document]]:
    """Yield the documents of each batch; up to `look_ahead` documents that do not fit wait for the next one.

    With `look_ahead` 1 the order is kept. A document that fits into no batch is left out.
    """
    waiting: list[Document] = []
    source = iter(documents)
    dry = False
    while waiting or not dry:
        heads, tails = size.rows - size.tails, size.tails
        group: list[Document] = []
        skipped: list[Document] = []
        while len(skipped) < look_ahead:
            document = waiting.pop(0) if waiting else next(source, None)
            if document is None:
                dry = True
                break
            head = tail_begin(document)
            tail = len(document.tokens) - head
            if head > size.rows - size.tails or tail > size.tails:
                continue
            if head <= heads and tail <= tails:
                heads, tails = heads - head, tails - tail
                group.append(document)
            else:
                skipped.append(document)
        waiting = skipped + waiting
        if group:
            yield group


def pack(documents: Sequence[Document], size: BatchSize, device: torch.device) -> PackedBatch:
    """Return a batch of these documents, which must fit."""
    lengths = [len(document.tokens) for document in documents]
    heads = [tail_begin(document) for document in documents]
    tail_lengths = [length - head for length, head in zip(lengths, heads, strict=True)]
    rest, tail_rest = size.rows - sum(lengths), size.tails - sum(tail_lengths)
    if not 0 <= tail_rest <= rest:
        raise ValueError("the documents do not fit into the batch")
    if rest:
        lengths, heads = [*lengths, rest], [*heads, rest - tail_rest]
        tail_lengths = [*tail_lengths, tail_rest]
    begins = np.cumsum([0, *lengths[:-1]])
    token_ids = np.concatenate([*(document.tokens for document in documents), np.zeros(rest, np.int32)])
    is_answer = np.concatenate([*(document.is_answer for document in documents), np.zeros(rest, np.bool_)])
    positions = np.concatenate([np.arange(length) for length in lengths])
    tail_rows = np.concatenate(
        [
            np.arange(begin + head, begin + length)
            for begin, head, length in zip(begins, heads, lengths, strict=True)
        ]
    )
    text_ends = np.repeat(begins + lengths, tail_lengths)

    def put(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return to_device(torch.from_numpy(array).to(dtype), device)

    return PackedBatch(
        put(token_ids),
        put(positions),
        put(is_answer, torch.bool),
        Spans.of(lengths, device),
        Spans.of(tail_lengths, device),
        put(tail_rows),
        put(text_ends),
        int(is_answer.sum()),
        tuple(documents),
    )
