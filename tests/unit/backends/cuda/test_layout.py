"""How passes are cut into tiles and rounded; on the host alone."""

import random
from dataclasses import replace

import numpy as np
import pytest

from foreword.backends.batch import Tap
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction
from helpers.cuda import needs_triton
from helpers.passes import make_request
from helpers.trees import random_tokens, random_tree

pytestmark = needs_triton


def laid_out(runs: list[int], drafts: list[Draft], group: int, kv_heads: int = 1, known: int = 0):
    """Each request has `known` tokens in KV memory before the rows of this pass."""
    from foreword.backends.cuda.layout import Layout
    from foreword.kv.paged_cache import PagedCache

    cache = PagedCache(200)
    rng = random.Random(0)
    requests = [make_request(cache, random_tokens(rng, known + run)) for run in runs]
    for request in requests:
        cache.reserve(request.kv, known)
        cache.commit(request.kv, known, [])
    entries = [PassEntry.of(request, run) for request, run in zip(requests, runs, strict=True)]
    with Transaction(cache, entries) as transaction:
        batch = transaction.batch(drafts)
        return batch, Layout.of(batch, cache.page_size, group, kv_heads)


@pytest.mark.parametrize(
    ("longest", "kv_heads", "splits"),
    [
        (1, 8, False),  # each by itself: that occupies the device
        (1, 4, True),
        (700, 8, True),  # this one would be waited for
    ],
)
def test_positions_are_split_unless_many_texts_are_about_as_long(longest: int, kv_heads: int, splits: bool):
    runs = [1] * 15 + [longest]
    drafts = [Draft.chain([1, 2], run) for run in runs]
    _, layout = laid_out(runs, drafts, 1, kv_heads)
    assert layout.shape.splits == splits


@pytest.mark.parametrize("group", [1, 3, 4, 7, 32, 128])
def test_every_row_is_in_one_tile_of_its_request(group: int):
    rng = random.Random(group)
    runs = [1, 300, 5, 1, 17]
    drafts = [random_tree(rng, 9, 1), Draft(), Draft(), Draft.chain(random_tokens(rng, 64), 1), Draft()]
    batch, layout = laid_out(runs, drafts, group)
    owners = np.full(len(batch.token_ids), -1)
    for tiles, most in ((layout.narrow, layout.shape.narrow_rows), (layout.wide, layout.shape.wide_rows)):
        assert (tiles.counts >= 1).all() and (tiles.counts <= most).all()
        for first, count, request in zip(tiles.first_rows, tiles.counts, tiles.requests, strict=True):
            assert (owners[first : first + count] == -1).all()
            owners[first : first + count] = request
    assert owners.tolist() == layout.requests.tolist()
    assert layout.shape.narrow_rows * group <= max(64, group), "lines that a program has registers for"
    assert not {0, 3} & set(layout.wide.requests.tolist()), (
        "guesses may branch, which wide tiles do not follow"
    )
    assert layout.shape.has_trees
    assert layout.shape.rows >= len(batch.token_ids) and layout.shape.rows % 256 == 0


def test_passes_of_like_size_have_one_shape():
    shapes = {laid_out([length] * 3, [Draft.chain([1, 2], length)] * 3, 4)[1].shape for length in (1, 1, 1)}
    assert len(shapes) == 1
    shape = shapes.pop()
    assert shape.is_decode and (shape.rows, shape.narrow_rows, shape.wide_tiles) == (16, 4, 0)
    assert not shape.has_trees


@pytest.mark.parametrize(("known", "parts"), [(0, 1), (100, 1), (140, 2), (300, 4), (390, 4)])
def test_the_shape_follows_from_the_longest_text_in_powers_of_two(known: int, parts: int):
    _, layout = laid_out([1] * 3, [Draft.chain([1, 2], 1 + known)] * 3, 4, known=known)
    assert (layout.shape.parts, layout.shape.pages) == (parts, 8 * parts)


@pytest.mark.parametrize(("known", "parts"), [(0, 4), (140, 4), (505, 4), (520, 16), (1900, 16)])
def test_a_single_request_has_few_shapes_while_its_text_grows(known: int, parts: int):
    _, layout = laid_out([1], [Draft.chain([1, 2], 1 + known)], 4, known=known)
    assert (layout.shape.parts, layout.shape.pages) == (parts, 8 * parts)


def test_a_pass_with_a_prompt_is_not_captured_and_its_short_texts_keep_their_parts():
    _, layout = laid_out([200, 1], [Draft(), Draft.chain([1, 2], 1)], 4)
    assert layout.shape.wide_tiles and layout.shape.rows <= 256 and not layout.shape.is_decode
    assert layout.shape.parts == 1, "the prompt's tiles go through all of their positions themselves"


def test_every_tap_is_kept_once():
    from foreword.backends.cuda.layout import Layout

    taps = Tap(3), Tap(0), Tap(3), Tap(3, normed=True), Tap(1)
    batch, _ = laid_out([1], [Draft()], 4)
    found = Layout.of(replace(batch, taps=taps), 16, 4, 1).shape.taps
    assert found == (Tap(3), Tap(0), Tap(3, normed=True), Tap(1))


@pytest.mark.parametrize("rows", [1, 6])
def test_sizes_to_prepare_are_one_for_each_shape_that_a_batch_can_have(rows: int):
    from foreword.backends.cuda.layout import PREPARED_LENGTHS, decode_sizes

    def shape(count: int):
        return laid_out([1] * count, [Draft.chain([1] * (rows - 1), 1)] * count, 4)[1].shape

    sizes = decode_sizes(12, 500, rows)
    lengths = [length for length in PREPARED_LENGTHS if length < 500]
    assert [size.length for size in sizes] == sorted(size.length for size in sizes), "short texts come first"
    assert {size.length for size in sizes} == set(lengths)
    shortest = [size.requests for size in sizes if size.length == lengths[0]]
    shapes = [shape(count) for count in shortest]
    assert len(set(shapes)) == len(shapes)
    assert {shape(count) for count in range(1, 13)} == set(shapes)


def test_sizes_to_prepare_are_of_small_passes_that_are_captured():
    from foreword.backends.cuda.layout import DECODE_ROWS, FEW_PARTS, FEW_TILES, PREPARED_ROWS, decode_sizes

    few = sum(rows <= FEW_TILES for rows in DECODE_ROWS)
    more = sum(FEW_TILES < rows <= PREPARED_ROWS for rows in DECODE_ROWS)
    assert len(decode_sizes(256, 1 << 17, 1)) == more * 5 + few * len(FEW_PARTS)
    assert max(size.requests * 9 for size in decode_sizes(256, 1 << 17, 9)) <= PREPARED_ROWS
    assert not decode_sizes(256, 1 << 17, PREPARED_ROWS + 1)
    parts = {-(-size.length // 128) for size in decode_sizes(4, 1 << 17, 1) if size.requests == 4}
    assert {1 << (count - 1).bit_length() for count in parts} == {1, 2, 4, 8, 16}
