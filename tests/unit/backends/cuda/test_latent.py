"""Latent attention on kernels: the kept row, products per head, and attention over kept rows in trees."""

import pytest
import torch
from torch import Tensor

from foreword.backends.torch.norms import rms_norm
from foreword.models.rope import rotate
from helpers.cuda import KERNEL_DEVICE, comparable_numbers, has_gpu, needs_triton

pytestmark = needs_triton

DTYPE = torch.bfloat16 if has_gpu else torch.float32
TOLERANCE = 3e-2 if has_gpu else 1e-4
HEADS, NOPE, ROPE, RANK, PAGE = 18, 12, 8, 20, 16  # more heads than one program takes


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=KERNEL_DEVICE).to(DTYPE)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=KERNEL_DEVICE)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), atol=TOLERANCE, rtol=TOLERANCE)


def test_the_kept_row_is_normed_and_rotated_and_so_is_the_end_of_every_query():
    from foreword.backends.cuda.kernels.latent import store_latent

    whole, norm, slots = random(3, HEADS * (NOPE + ROPE) + RANK + ROPE), random(RANK), ints(4, 0, 2)
    query, row = whole[:, : HEADS * (NOPE + ROPE)], whole[:, HEADS * (NOPE + ROPE) :]
    angles = torch.randn(3, ROPE // 2, device=KERNEL_DEVICE)
    keys = torch.full((6, 1, RANK + ROPE), float("nan"), device=KERNEL_DEVICE, dtype=DTYPE)
    queries = torch.full((3, HEADS, RANK + ROPE), float("nan"), device=KERNEL_DEVICE, dtype=DTYPE)
    store_latent(query, row, norm, (angles.cos(), angles.sin()), slots, 0.1, keys, queries)
    turns = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    close(queries[..., RANK:], rotate(query.view(3, HEADS, -1)[..., NOPE:], *turns))
    assert queries[..., :RANK].isnan().all()
    close(keys[slots.long(), 0, :RANK], rms_norm(row[:, :RANK], norm, 0.1))
    close(keys[slots.long(), :, RANK:], rotate(row[:, None, RANK:], *turns))
    assert keys[[1, 3, 5]].isnan().all()


@pytest.mark.parametrize("rows", [1, 21])
def test_every_head_has_weights_of_its_own(rows: int):
    from foreword.backends.cuda.kernels.latent import per_head
    from foreword.backends.cuda.kernels.linear import Tile

    heads, weight = comparable_numbers(rows, 3, 40, dtype=DTYPE), comparable_numbers(3, 70, 24, dtype=DTYPE)
    out = torch.full((rows, 3, 80), float("nan"), device=KERNEL_DEVICE, dtype=DTYPE)
    per_head(heads[..., :24], weight, out, Tile(16, 64, 32, swapped=True))
    close(out[..., :70], torch.einsum("rhk,hnk->rhn", heads[..., :24].float(), weight.float()))
    assert out[..., 70:].isnan().all()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("heads", [4, 18])
def test_rows_see_latent_rows_of_their_path(heads: int, split: bool):
    """A tree after 130 committed tokens, so that there is more than one part, and more steps than one in it."""
    from foreword.backends.cuda.kernels.ancestors import ancestor_slots
    from foreword.backends.cuda.kernels.attention import (
        AttentionMetadata,
        RowTiles,
        ScoreRule,
        Workspace,
        attend,
    )

    prefix, masks = 130, [0b1, 0b11, 0b101]
    table = torch.randperm(12)[:10].to(torch.int32).to(KERNEL_DEVICE)
    keys, queries = random(12 * PAGE, 1, RANK + ROPE), random(3, heads, RANK + ROPE)
    lengths = [prefix + mask.bit_count() for mask in masks]
    prefixes = ints(prefix, prefix, prefix)
    words = torch.tensor([[mask] for mask in masks], dtype=torch.int64, device=KERNEL_DEVICE)
    ancestors = ancestor_slots(prefixes, words, ints(0, 0, 0), table[None], PAGE)
    positions = ints(*(length - 1 for length in lengths))
    metadata = AttentionMetadata(positions, prefixes, table[None], ancestors, PAGE, has_trees=True)
    tiles = RowTiles(ints(0), ints(3), ints(0), 4)
    found = torch.full((3, heads, RANK), float("nan"), device=KERNEL_DEVICE, dtype=DTYPE)
    room = Workspace.allocate(tiles, heads, 2, RANK) if split else None
    attend(queries, keys, keys[..., :0], metadata, tiles, found, room, ScoreRule(scale=0.3))
    for row, mask in enumerate(masks):
        seen = [*range(prefix), *(prefix + node for node in range(3) if mask >> node & 1)]
        slots = torch.tensor([int(table[place // PAGE]) * PAGE + place % PAGE for place in seen])
        rows = keys[slots.to(KERNEL_DEVICE), 0].double()
        weights = (queries[row].double() @ rows.T * 0.3).softmax(-1)
        close(found[row], weights @ rows[:, :RANK])
