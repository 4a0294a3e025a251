"""Paged attention over prefix and ancestors against a sum written out for every row."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from helpers.cuda import KERNEL_DEVICE, has_gpu, needs_triton, packed_rows

pytestmark = needs_triton

PAGE, HEADS, KV_HEADS, DIM = 16, 6, 2, 40


@dataclass(frozen=True)
class Row:
    request: int
    position: int
    prefix: int
    mask: int


def tree_rows(request: int, prefix: int, parents: list[int]) -> list[Row]:
    """The newest committed token, then a tree of guesses."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    guesses = [Row(request, prefix + mask.bit_count() - 1, prefix, mask) for mask in masks]
    return [Row(request, prefix - 1, prefix, 0), *guesses]


def prompt_rows(request: int, first: int, count: int) -> list[Row]:
    return [Row(request, first + i, first + i + 1, 0) for i in range(count)]


Rule = tuple[float | None, float | None, int | None]
PLAIN: Rule = (None, None, None)  # scale, soft cap, window
DTYPES = [torch.float32, torch.bfloat16] if has_gpu else [torch.float32]
CASES = {
    "plain": [tree_rows(0, 1, []), tree_rows(1, 300, []), tree_rows(2, 256, [])],
    "chains": [tree_rows(0, 255, [-1, 0, 1]), tree_rows(1, 37, [-1, 0, 1, 2, 3])],
    "trees": [
        [*prompt_rows(0, 288, 2), *tree_rows(0, 290, [-1, 0, -1, 2])[1:]],
        tree_rows(1, 254, [-1, -1, 0, 1, 3]),
        tree_rows(2, 9, []),
    ],
    "prompts": [prompt_rows(0, 0, 5), prompt_rows(1, 254, 4), tree_rows(2, 64, [-1, -1, 0])],
}


def expected_row(
    row: Row,
    query: Tensor,
    kv: tuple[Tensor, Tensor],
    table: list[int],
    start: int,
    rule: Rule,
) -> Tensor:
    keys, values = kv
    scale, softcap, window = rule
    path = [*range(row.prefix), *(row.prefix + node for node in range(64) if row.mask >> node & 1)]
    seen = path[max(start, 0 if window is None else len(path) - window) :]
    slots = torch.tensor([table[place // PAGE] * PAGE + place % PAGE for place in seen], device=keys.device)
    k = keys[slots].double().repeat_interleave(HEADS // KV_HEADS, dim=1)  # [seen, heads, dim]
    v = values[slots].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("hd,shd->hs", query.double(), k) * (scale or DIM**-0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hs,shd->hd", scores.softmax(-1), v)


SEEN: list[tuple[str, tuple[int, ...] | None, bool, int]] = [
    *((case, None, True, 4) for case in CASES),
    *((case, None, False, 4) for case in ("chains", "trees", "prompts")),
    ("trees", None, True, 1),
    *(("plain", (0, 140, 1), split, 4) for split in (True, False)),
    ("trees", (270, 1, 0), True, 4),
]
"""Cases, starts of their requests, whether positions are split, and rows of a tile."""

SEEN_PACKED = SEEN if has_gpu else [("trees", None, True, 4), ("prompts", None, False, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("case", "starts", "split", "tile_rows", "packed"),
    [*((*seen, False) for seen in SEEN), *((*seen, True) for seen in SEEN_PACKED)],
)
def test_every_row_sees_its_prefix_and_its_ancestors(
    case: str,
    starts: tuple[int, ...] | None,
    split: bool,
    tile_rows: int,
    packed: bool,
    dtype: torch.dtype,
):
    check(case, starts, split, tile_rows, PLAIN, dtype, packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("case", "split", "rule"),
    [
        *(("prompts", split, (None, None, 130)) for split in (True, False)),
        *((case, True, (None, None, 130)) for case in ("plain", "chains", "trees")),
        *(("trees", False, (None, None, window)) for window in (3, 130)),
        *(("prompts", split, (0.4, 1.5, None)) for split in (True, False)),
    ],
)
def test_windows_scales_and_caps(case: str, split: bool, rule: Rule, dtype: torch.dtype):
    check(case, None, split, 4, rule, dtype)


def check(
    case: str,
    starts: tuple[int, ...] | None,
    split: bool,
    tile_rows: int,
    rule: Rule,
    dtype: torch.dtype,
    packed: bool = False,
) -> None:
    """Rows before a request's start and before the window of all its rows are not there, and may hold anything."""
    from foreword.backends.cuda.kernels.ancestors import ancestor_slots
    from foreword.backends.cuda.kernels.attention import (
        AttentionMetadata,
        RowTiles,
        ScoreRule,
        Workspace,
        attend,
    )

    groups, rng = CASES[case], random.Random(7)
    rows = [row for group in groups for row in group]
    pages = rng.sample(range(200), 20 * len(groups))
    tables = [pages[20 * i : 20 * (i + 1)] for i in range(len(groups))]
    keys, values = (torch.randn(200 * PAGE, KV_HEADS, DIM, device=KERNEL_DEVICE).to(dtype) for _ in range(2))
    queries = torch.randn(len(rows), HEADS, DIM, device=KERNEL_DEVICE).to(dtype)

    def ints(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=KERNEL_DEVICE)

    tiles, first = [], 0
    for request, group in enumerate(groups):
        tiles += [
            (first + i, min(tile_rows, len(group) - i), request) for i in range(0, len(group), tile_rows)
        ]
        first += len(group)
    tiles.append((0, 0, 0))  # as padding has it
    tiles.reverse()  # a tile that wrote rows of the next one would do so after it
    row_tiles = RowTiles(*(ints(list(column)) for column in zip(*tiles, strict=True)), tile_rows)
    prefixes, block_tables = (
        ints([row.prefix for row in rows]),
        torch.stack([ints(table) for table in tables]),
    )
    masks = torch.tensor([[row.mask] for row in rows], dtype=torch.int64, device=KERNEL_DEVICE)
    ancestors = ancestor_slots(prefixes, masks, ints([row.request for row in rows]), block_tables, PAGE)
    has_trees = any(row.mask & (row.mask + 1) for row in rows)
    metadata = AttentionMetadata(
        ints([row.position for row in rows]), prefixes, block_tables, ancestors, PAGE, has_trees
    )
    hidden = [0] * len(groups)
    if starts is not None:
        metadata, hidden = replace(metadata, starts=ints(list(starts))), list(starts)
    if rule[2] is not None:
        hidden = [max(0, min(row.position for row in group) + 1 - rule[2]) for group in groups]
    if any(hidden):
        for table, start in zip(tables, hidden, strict=True):
            for place in range(start):
                keys[table[place // PAGE] * PAGE + place % PAGE] = float("nan")
                values[table[place // PAGE] * PAGE + place % PAGE] = float("nan")
    workspace = Workspace.allocate(row_tiles, HEADS, 4, DIM) if split else None
    found = torch.full_like(queries, float("nan"))
    stored = keys, values
    if packed:
        (stored_keys, keys), (stored_values, values) = packed_rows(keys), packed_rows(values)
        stored = stored_keys, stored_values
    attend(queries, *stored, metadata, row_tiles, found, workspace, ScoreRule(*rule))
    for row, query, result in zip(rows, queries, found, strict=True):
        start = 0 if starts is None else starts[row.request]
        expected = expected_row(row, query, (keys, values), tables[row.request], start, rule)
        assert (result.double() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("split", [False, True])
def test_a_sink_takes_its_part_of_the_softmax(split: bool):
    """Once in every row, however many parts its positions have."""
    from foreword.backends.cuda.kernels.attention import (
        AttentionMetadata,
        RowTiles,
        ScoreRule,
        Workspace,
        attend,
    )

    def ints(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=KERNEL_DEVICE)

    table, length = ints(*range(20))[None], 300
    keys, values = (torch.randn(20 * PAGE, KV_HEADS, DIM, device=KERNEL_DEVICE) for _ in range(2))
    queries, sinks = (
        torch.randn(1, HEADS, DIM, device=KERNEL_DEVICE),
        torch.randn(HEADS, device=KERNEL_DEVICE) + 6,
    )
    metadata = AttentionMetadata(ints(length - 1), ints(length), table, ints(0), PAGE, has_trees=False)
    tiles, found = RowTiles(ints(0), ints(1), ints(0), 1), torch.full_like(queries, float("nan"))
    workspace = Workspace.allocate(tiles, HEADS, 4, DIM) if split else None
    attend(queries, keys, values, metadata, tiles, found, workspace, ScoreRule(sinks=sinks))
    k, v = (rows[:length].double().repeat_interleave(HEADS // KV_HEADS, dim=1) for rows in (keys, values))
    scores = torch.einsum("hd,shd->hs", queries[0].double(), k) * DIM**-0.5
    weights = torch.cat((scores, sinks.double()[:, None]), dim=1).softmax(-1)[:, :length]
    assert (found[0].double() - torch.einsum("hs,shd->hd", weights, v)).abs().max() < 1e-5


def test_shares_of_more_parts_than_are_computed_together():
    from foreword.backends.cuda.kernels import attention

    parts, heads = attention.SHARE_BLOCK + 6, 3
    peaks, masses = (torch.rand(2, heads, parts, device=KERNEL_DEVICE) for _ in range(2))
    counts = (parts, attention.SHARE_BLOCK + 1)
    last = torch.tensor(
        [counts[0] * attention.PART - 1, (counts[1] - 1) * attention.PART],
        dtype=torch.int32,
        device=KERNEL_DEVICE,
    )
    shares = torch.zeros(2, parts, device=KERNEL_DEVICE)
    attention._add_shares[(2,)](
        *(peaks, masses, last, shares, parts),
        **{"HEADS": heads, "BLOCK": attention.SHARE_BLOCK, "PART": attention.PART, "num_warps": 1},
    )
    for row, count in enumerate(counts):
        weights = masses[row, :, :count] * torch.exp2(peaks[row, :, :count])
        expected = (weights / weights.sum(1, keepdim=True)).sum(0)
        torch.testing.assert_close(shares[row, :count], expected)
        assert not shares[row, count:].any()
