"""Batches of fixed size: everything is in them once, and rows predict what they should."""

import itertools

import numpy as np
import pytest
import torch

from foreword.errors import RequestError
from foreword.train.passes.packing import BatchSize, batches, pack, tail_begin
from foreword.train.texts.documents import Document, make_document

CPU = torch.device("cpu")


def _documents(count: int, seed: int = 0) -> list[Document]:
    random = np.random.default_rng(seed)
    documents = []
    for number in range(count):
        prompt, answer = random.integers(1, 20), random.integers(2, 15)
        tokens = random.integers(0, 1000, prompt + answer)
        tokens[0] = number
        documents.append(make_document(tokens.tolist(), [(prompt, prompt + answer)], "x", 0.0))
    return documents


def test_rows_hold_and_predict_their_own_texts_tokens():
    documents = _documents(3)
    rows = sum(len(document.tokens) for document in documents) + 9
    tails = sum(len(document.tokens) - tail_begin(document) for document in documents) + 4
    batch = pack(documents, BatchSize(rows, tails), CPU)
    row = 0
    for document in documents:
        for slot in range(tail_begin(document), len(document.tokens)):
            for step in range(4):
                token, counts = (tensor[row] for tensor in batch.predicted(step))
                place = slot + step + 2
                inside = place < len(document.tokens)
                assert bool(counts) == (
                    inside and bool(document.is_answer[min(place, len(document.tokens) - 1)])
                )
                if inside:
                    assert token == document.tokens[place]
                    assert batch.input_tokens(step)[row] == document.tokens[place - 1]
            row += 1
    assert not batch.predicted(0)[1][row:].any()
    assert len(batch.tail_rows) == tails and len(batch.token_ids) == rows


def test_an_epoch_has_every_text_once_and_skipping_goes_on_where_it_was():
    documents = _documents(200)
    size = BatchSize(256, 128)
    seen: list[int] = []
    source = batches(documents, size, (1,), CPU)
    taken = []
    while len(seen) < 200:
        number, batch = next(source)
        assert number == len(taken)
        taken.append(batch)
        seen += [int(document.tokens[0]) for document in taken[-1].documents]
    assert sorted(seen) == list(range(200))
    assert len(taken) < 1.3 * sum(len(document.tokens) for document in documents) / 256 + 2
    _, again = next(batches(documents, size, (1,), CPU, skip=3))
    assert torch.equal(again.token_ids, taken[3].token_ids)


def test_later_epochs_have_the_same_batches_in_another_order():
    documents, size = _documents(200), BatchSize(256, 128)
    source = batches(documents, size, (1,), CPU)
    first = {}
    while (numbered := next(source))[0] not in first:
        first[numbered[0]] = numbered[1]
    second = [numbered, *itertools.islice(source, len(first) - 1)]
    assert sorted(number for number, _ in second) == list(first)
    assert [number for number, _ in second] != list(first)
    assert all(torch.equal(batch.token_ids, first[number].token_ids) for number, batch in second)
    resumed = batches(documents, size, (1,), CPU, skip=len(first) + 2)
    assert next(resumed)[0] == second[2][0]


def test_what_fits_into_no_batch_is_refused_or_left_out():
    documents = _documents(5)
    with pytest.raises(ValueError, match="do not fit"):
        pack(documents, BatchSize(20, 10), CPU)
    with pytest.raises(RequestError, match="no text fits into a step"):
        next(batches(documents, BatchSize(4, 2), (0,), CPU))
