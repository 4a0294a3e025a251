"""Packs concatenated texts into batches of fixed size, and marks the rows that predict answers.

A head's input at row i is token i + 1 and the target's state at row i. It predicts token i + 2. A head computes keys
and values for every row. It drafts only in the tail of a text, which begins with the row that predicts the answer's
first token.
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
    """Numbers of rows of a batch, in total and in tails. Unused rows are padding, which has no loss."""

    rows: int
    tails: int


@dataclass(frozen=True)
class PackedBatch:
    """A batch on the device."""

    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    is_answer: Tensor  # bool [rows]
    texts: Spans  # rows of each text
    tails: Spans  # tail rows of each text, as ranges of `tail_rows`
    tail_rows: Tensor  # int64 [tails], index of each tail row among all rows
    text_ends: Tensor  # int64 [tails], one past the last row of the tail row's text
    num_answer_tokens: int
    documents: tuple[Document, ...]

    def predicted(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the token that draft token `step` of each tail row must equal, and whether it is in an answer."""
        rows = self.tail_rows + step + 2
        is_inside = rows < self.text_ends
        rows = rows.clamp(max=len(self.token_ids) - 1)
        return self.token_ids[rows], is_inside & self.is_answer[rows]

    def input_tokens(self, step: int) -> Tensor:
        """Return each tail row's input token for draft token `step`: the text's token before the predicted one."""
        return self.token_ids[(self.tail_rows + step + 1).clamp(max=len(self.token_ids) - 1)]


def tail_begin(document: Document) -> int:
    """Return the first row that predicts an answer token."""
    return max(document.answer_begin - 2, 0)


def fitting_size(documents: Sequence[Document], rows: int, multiple: int = 256) -> BatchSize:
    """Return a batch size with the documents' fraction of tail rows, rounded to a `multiple`."""
    total = sum(len(document.tokens) for document in documents)
    tails = sum(len(document.tokens) - tail_begin(document) for document in documents)
    rounded = max(1, round(rows * tails / max(total, 1) / multiple)) * multiple
    return BatchSize(rows, min(rounded, rows - rows // 64 - 1))  # the other rows are for prompts


def exact_size(documents: Sequence[Document]) -> BatchSize:
    """Return the size of a batch filled exactly by these documents."""
    rows = sum(len(document.tokens) for document in documents)
    return BatchSize(rows, rows - sum(tail_begin(document) for document in documents))


def sample_batch(documents: Sequence[Document], device: torch.device) -> PackedBatch:
    """Return a batch of the first 64 documents."""
    return pack(documents[:64], exact_size(documents[:64]), device)


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
    """Yield (batch number, batch) forever, each epoch in another seeded order, without the first `skip` batches.

    Every epoch has the same batches, so that the target's states can be cached by batch number.
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

    With `look_ahead` 1 the documents stay in order. A document that fits into no batch is left out.
    """
    waiting: list[Document] = []
    source = iter(documents)
    is_exhausted = False
    while waiting or not is_exhausted:
        free_head, free_tail = size.rows - size.tails, size.tails  # free rows before and in the tails
        group: list[Document] = []
        skipped: list[Document] = []
        while len(skipped) < look_ahead:
            document = waiting.pop(0) if waiting else next(source, None)
            if document is None:
                is_exhausted = True
                break
            head = tail_begin(document)
            tail = len(document.tokens) - head
            if head > size.rows - size.tails or tail > size.tails:  # fits into no batch
                continue
            if head <= free_head and tail <= free_tail:
                free_head, free_tail = free_head - head, free_tail - tail
                group.append(document)
            else:
                skipped.append(document)
        waiting = skipped + waiting
        if group:
            yield group


def pack(documents: Sequence[Document], size: BatchSize, device: torch.device) -> PackedBatch:
    """Return a batch of these documents; raise `ValueError` if they do not fit."""
    lengths = [len(document.tokens) for document in documents]
    heads = [tail_begin(document) for document in documents]
    tail_lengths = [length - head for length, head in zip(lengths, heads, strict=True)]
    padding, tail_padding = size.rows - sum(lengths), size.tails - sum(tail_lengths)
    if not 0 <= tail_padding <= padding:
        raise ValueError("the documents do not fit into the batch")
    if padding:  # packed like one more text, without answer tokens
        lengths, heads = [*lengths, padding], [*heads, padding - tail_padding]
        tail_lengths = [*tail_lengths, tail_padding]
    begins = np.cumsum([0, *lengths[:-1]])
    token_ids = np.concatenate([*(document.tokens for document in documents), np.zeros(padding, np.int32)])
    is_answer = np.concatenate([*(document.is_answer for document in documents), np.zeros(padding, np.bool_)])
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
