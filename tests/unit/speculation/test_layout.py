"""Passes laid out in memory that is used again equal the plain definition, whatever was there before."""

import random
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

import pytest
import torch

from foreword.backends.batch import MAX_DRAFT_NODES, ForwardBatch, Tap
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import FREED, KvSequence, RowMove
from foreword.speculation.draft import Draft
from foreword.speculation.layout import PAGES_AT_ONCE, BatchBuffers, PageTables, SequenceRows
from helpers.trees import random_tokens, random_tree


def table(pages: Sequence[int], most: int | None = None) -> list[int]:
    """The pages of one sequence, filled up to the width of a table for the longest."""
    width = -(-(most or len(pages)) // PAGES_AT_ONCE) * PAGES_AT_ONCE
    return [*pages, *[0] * (width - len(pages))]


def by_definition(
    cache: PagedCache, shares: Sequence[SequenceRows], moves: Sequence[RowMove], tapped: bool = False
) -> dict[str, object]:
    """Row by row, in plain lists."""
    rows, logit_rows, hidden_rows, starts = [], [], [], [0]
    for share in shares:
        end = share.kv.computed + share.run
        for row in range(share.kv.computed, end):
            if row >= end - share.run_logits:
                logit_rows.append(len(rows))
            rows.append((share.tokens[row], row, cache.slot(share.kv, row), row + 1, 0))
        for node in range(share.first_node, len(share.draft)):
            mask = share.draft.ancestor_masks()[node]
            signed = mask - (1 << 64) if mask >> 63 else mask
            position = end + share.draft.depths()[node] - 1
            logit_rows.append(len(rows))
            rows.append((share.draft.tokens[node], position, cache.slot(share.kv, end + node), end, signed))
        if share.wants_hidden and tapped:
            hidden_rows += range(starts[-1], len(rows))
        starts.append(len(rows))
    most_pages = max((len(share.kv.pages) for share in shares), default=0)
    columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * 5
    return {
        "token_ids": columns[0],
        "positions": columns[1],
        "slots": columns[2],
        "prefix_lens": columns[3],
        "ancestor_masks": [[mask] for mask in columns[4]],
        "row_starts": starts,
        "block_tables": [table(share.kv.pages, most_pages) for share in shares],
        "kv_lens": [share.kv.computed + share.run + len(share.draft) for share in shares],
        "logit_rows": logit_rows,
        "kv_copies": [[move.source, cache.slot(move.owner, move.row)] for move in moves],
        "hidden_rows": hidden_rows,
    }


def as_lists(batch: ForwardBatch) -> dict[str, object]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value.tolist() for name, value in values.items() if isinstance(value, torch.Tensor)}


def sequence(cache: PagedCache, computed: int, rows: int) -> KvSequence:
    kv = cache.open()
    cache.reserve(kv, computed)
    cache.advance(kv, computed)
    cache.reserve(kv, rows)
    return kv


def random_share(rng: random.Random, cache: PagedCache) -> SequenceRows:
    computed, run = rng.choice([0, 1, 15, 16, 17, 100]), rng.choice([0, 1, 1, 1, 2, 16, 40])
    draft = random_tree(rng, rng.choice([0, 0, 1, 5, 20, MAX_DRAFT_NODES]), computed + run)
    first_node = rng.randint(0, len(draft)) if run == 0 else 0
    kv = sequence(cache, computed, run + len(draft))
    return SequenceRows(
        kv,
        random_tokens(rng, computed + run),
        run,
        draft,
        first_node,
        rng.choice([0, 1, 1, 3, 99]),
        rng.random() < 0.5,
    )


@pytest.mark.parametrize("entries", [0, 1, 300, 1 << 16])
def test_any_pass_after_any_other_equals_the_definition(entries: int):
    rng = random.Random(entries)
    buffers = BatchBuffers(entries)
    for _ in range(60):
        cache = PagedCache(400)
        churn = [sequence(cache, 1, 0) for _ in range(400)]
        for kv in rng.sample(churn, 400):
            cache.close(kv)
        shares = [random_share(rng, cache) for _ in range(rng.choice([0, 1, 1, 2, 7, 20]))]
        owners = [share.kv for share in shares if share.kv.computed]
        moves = [
            RowMove(rng.choice(owners), rng.randrange(6400), 0) for _ in range(rng.randint(0, 9)) if owners
        ]
        taps = rng.choice([(), (Tap(0),), (Tap(1), Tap(2, normed=True))])
        expected = by_definition(cache, shares, moves, bool(taps))
        for own in (buffers, BatchBuffers(entries=0)):
            batch = own.lay_out(cache, shares, moves, taps)
            assert as_lists(batch) == expected
            assert batch.taps == taps


@pytest.mark.parametrize("sequences", [1, 3, 20])
def test_a_pass_of_single_rows_equals_the_definition(sequences: int):
    rng = random.Random(sequences)
    cache, buffers = PagedCache(400), BatchBuffers()
    tokens = random_tokens(rng, 101)
    for _ in range(4):
        shares = [
            SequenceRows(sequence(cache, computed, rng.choice([1, 20])), tokens[: computed + 1], 1, Draft())
            for computed in rng.choices([0, 1, 15, 16, 17, 100], k=sequences)
        ]
        assert as_lists(buffers.lay_out(cache, shares, [])) == by_definition(cache, shares, [])
        for share in shares:
            cache.close(share.kv)


def test_parts_of_one_row_that_are_nodes_of_drafts_equal_the_definition():
    cache = PagedCache(64)
    chain = Draft.chain(range(4), 20)
    shares = [
        SequenceRows(sequence(cache, 20, 4), list(range(20)), 0, chain, first_node=3),
        SequenceRows(sequence(cache, 20, 1), list(range(21)), 1, Draft()),
    ]
    assert as_lists(BatchBuffers().lay_out(cache, shares, [])) == by_definition(cache, shares, [])


@pytest.mark.parametrize("missing", [0, 1])
def test_memory_that_fits_exactly_and_memory_that_is_one_entry_short(missing: int):
    cache = PagedCache(64)
    tokens = list(range(40))
    shares = [
        SequenceRows(sequence(cache, 39, 65), tokens, 1, Draft.chain(range(MAX_DRAFT_NODES), 40))
        for _ in range(3)
    ]
    expected = by_definition(cache, shares, [])
    entries = sum(
        value.numel() * value.itemsize // 4
        for value in vars(BatchBuffers(entries=0).lay_out(cache, shares, [])).values()
        if isinstance(value, torch.Tensor)
    )
    buffers = BatchBuffers(entries - missing)
    for _ in range(3):
        assert as_lists(buffers.lay_out(cache, shares, [])) == expected


def test_a_batch_holds_while_the_next_one_is_laid_out():
    cache, buffers = PagedCache(400), BatchBuffers(200)
    rng = random.Random(3)
    shares = [[random_share(rng, cache)] for _ in range(12)]
    before = buffers.lay_out(cache, shares[0], [])
    for last, following in pairwise(shares):
        batch = buffers.lay_out(cache, following, [])  # some of these make the memory grow
        assert as_lists(before) == by_definition(cache, last, [])
        before = batch


def test_pages_that_were_exchanged_behind_the_same_length_are_seen():
    cache, buffers = PagedCache(64), BatchBuffers()
    kv, other = sequence(cache, 60, 1), cache.open()
    share = SequenceRows(kv, list(range(64)), 1, Draft())
    for kept in (60, 48, 20, 0, 33):
        for _ in range(2):
            assert as_lists(buffers.lay_out(cache, [share], [])) == by_definition(cache, [share], [])
        pages = list(kv.pages)
        cache.rewind(kv, kept)
        cache.reserve(other, other.reserved + 20)  # takes what was given back
        cache.reserve(kv, 61 - kept)
        cache.advance(kv, 60 - kept)
        assert len(kv.pages) == len(pages)
        assert (kv.pages != pages) == (kept < 60)


def test_a_shorter_request_does_not_inherit_the_pages_of_a_longer_one():
    cache, buffers = PagedCache(64), BatchBuffers()
    shares = [
        SequenceRows(sequence(cache, rows, 1), list(range(rows + 1)), 1, Draft()) for rows in (200, 10, 90)
    ]
    for order in ([0, 1], [1, 0], [2, 0], [1, 0], [0], [1], [2, 1, 0]):
        chosen = [shares[index] for index in order]
        assert as_lists(buffers.lay_out(cache, chosen, [])) == by_definition(cache, chosen, [])


def test_a_growing_request_does_not_make_room_for_more_requests():
    cache, tables = PagedCache(1000), PageTables()
    kv = cache.open()
    for rows in range(0, 16_000, 160):
        cache.reserve(kv, rows)
        assert tables.of([kv], 16).tolist() == [table(kv.pages)]
    assert tables.of([kv], 16).base.size <= 2 * 1000


def test_arrays_have_new_sizes_once_in_many_pages():
    """Else those of the last pass of this size could seldom be used again."""
    cache, buffers = PagedCache(64), BatchBuffers()
    widths = []
    for rows in range(16, 520, 16):
        share = SequenceRows(sequence(cache, rows - 1, 1), list(range(rows)), 1, Draft())
        widths.append(buffers.lay_out(cache, [share], []).block_tables.shape[1])
        cache.close(share.kv)
    assert widths == [8] * 8 + [16] * 8 + [24] * 8 + [32] * 8


def test_pages_that_are_gone_are_no_numbers_in_a_table():
    """Behind a window: a kernel may look at any entry, so all of them have to be pages."""
    cache, tables = PagedCache(8), PageTables()
    kv = cache.open()
    cache.reserve(kv, 64)
    before = list(kv.pages)
    assert tables.of([kv], 16).tolist() == [table(before)]
    kv.computed = 64
    kv.pages[:2] = [FREED, FREED]
    assert tables.of([kv], 16).tolist() == [table([0, 0, *before[2:]])]


@pytest.mark.parametrize("rows", [6, 12])
def test_rows_behind_the_last_page_are_refused(rows: int):
    """Few rows and many: they would be written into the page of another."""
    cache = PagedCache(8)
    sequence(cache, 0, 1)
    kv = sequence(cache, 11, 1)
    share = SequenceRows(kv, list(range(30)), rows, Draft())
    with pytest.raises(IndexError):
        BatchBuffers().lay_out(cache, [share], [])


def test_a_run_behind_the_last_token_is_refused():
    cache = PagedCache(8)
    for rows in (2, 3):
        with pytest.raises(ValueError, match="last token"):
            BatchBuffers(entries=0).lay_out(
                cache, [SequenceRows(sequence(cache, 0, rows), [5], rows, Draft())], []
            )
