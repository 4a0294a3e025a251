"""Every Triton kernel against torch, on odd sizes and outputs full of NaN: on a GPU, or interpreted."""

import pytest
import torch
from torch import Tensor

from helpers.cuda import KERNEL_DEVICE, has_gpu, needs_triton, packed_rows

pytestmark = needs_triton

DTYPES = [torch.float32, torch.bfloat16] if has_gpu else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
EPS = 0.1  # large enough that a norm without it is off by more than the tolerance


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=KERNEL_DEVICE).to(dtype)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), device=KERNEL_DEVICE, dtype=dtype)


def ints(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=KERNEL_DEVICE)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    scale = expected.abs().max().float() + 1e-6
    return bool(((found.float() - expected.float()).abs().max() / scale) < TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 48, 64), (5, 70, 96), (33, 130, 100)])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(sizes: tuple[int, int, int], swapped: bool, biased: bool, dtype: torch.dtype):
    from foreword.backends.cuda.kernels.linear import Tile, linear

    rows, columns, depth = sizes
    x, weight = random(rows, depth, dtype=dtype), random(columns, depth, dtype=dtype)
    bias = random(columns, dtype=dtype) if biased else None
    found = linear(x, weight, bias, poison(rows, columns, dtype=dtype), Tile(16, 64, 32, swapped=swapped))
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert close(found, expected, dtype)


def in_parts(x: Tensor, weight: Tensor, depth: int) -> Tensor:
    """float64 [parts, rows, columns]."""
    pairs = zip(x.double().split(depth, dim=1), weight.double().split(depth, dim=1), strict=True)
    return torch.stack([of_x @ of_weight.T for of_x, of_weight in pairs])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(5, 70, 96, 32), (33, 48, 100, 36), (3, 40, 80, 32)])
def test_products_in_parts(sizes: tuple[int, int, int, int], dtype: torch.dtype):
    """Depths that no load ends at, and a last part that is shorter."""
    from foreword.backends.cuda.kernels.linear import Tile, linear

    rows, columns, depth, part = sizes
    x, weight = random(rows, depth, dtype=dtype), random(columns, depth, dtype=dtype)
    found = linear(x, weight, None, poison(-(-depth // part), rows, columns), Tile(16, 64, 32), part)
    assert close(found, in_parts(x, weight, part), dtype)


@pytest.mark.parametrize("sizes", [(5, 0, 48, 64, 64), (40, 16, 70, 128, 64), (90, 16, 130, 64, 32)])
def test_tall_products(sizes: tuple[int, int, int, int, int]):
    from foreword.backends.cuda.kernels.tall import TallTile, tall_linear

    rows, more, columns, depth, part = sizes
    dtype = torch.bfloat16 if has_gpu else torch.float32
    x, weight = random(rows, depth, dtype=dtype), random(columns, depth, dtype=dtype)
    tile = TallTile(32, more, 64, 32, stages=2)
    found = tall_linear(x, weight, poison(depth // part, rows, columns), tile, part)
    assert close(found, in_parts(x, weight, part), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_parts_are_joined_in_their_order_and_rounded_once(biased: bool, dtype: torch.dtype):
    from foreword.backends.cuda.kernels.rows import add_norm, join_parts

    width = 1100  # more than one program takes
    parts, bias = random(4, 3, width), random(width, dtype=dtype) if biased else None
    total = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    expected = (total if bias is None else total + bias.float()).to(dtype)
    assert torch.equal(join_parts(parts, bias, poison(3, width, dtype=dtype)), expected)
    streams, weight = random(3, width, dtype=dtype).repeat(2, 1, 1), random(width, dtype=dtype)
    deltas = parts, expected  # which has its bias
    normed = [
        add_norm(stream, delta, weight, EPS, poison(3, width, dtype=dtype), bias=bias)
        for stream, delta in zip(streams, deltas, strict=True)
    ]
    assert torch.equal(*streams)
    assert torch.equal(*normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_add_norm(adds: bool, dtype: torch.dtype):
    from foreword.backends.cuda.kernels.rows import add_norm
    from foreword.backends.torch.norms import rms_norm

    stream, delta, weight = random(3, 72, dtype=dtype), random(3, 72, dtype=dtype), random(72, dtype=dtype)
    total = stream + delta if adds else stream.clone()
    found = add_norm(stream, delta if adds else None, weight, EPS, poison(3, 72, dtype=dtype))
    assert torch.equal(stream, total)
    assert close(found, rms_norm(total, weight, EPS), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("after", [False, True])
def test_what_is_added_may_be_normed_and_scaled_first_and_the_sum_left_alone(after: bool, dtype: torch.dtype):
    from foreword.backends.cuda.kernels.rows import add_norm
    from foreword.backends.torch.norms import rms_norm

    stream, delta, weight = random(3, 72, dtype=dtype), random(3, 72, dtype=dtype), random(72, dtype=dtype)
    more = rms_norm(delta, weight, EPS) if after else delta
    expected = stream + more * 0.25
    out = poison(3, 72, dtype=dtype)
    found = add_norm(stream, delta, weight[:0], EPS, out, None, weight if after else None, 0.25)
    assert found is stream and close(stream, expected, dtype)
    assert out.isnan().all()
    assert add_norm(stream, None, weight[:0], EPS, out) is stream


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_over_all_heads_leave_values_alone(dtype: torch.dtype):
    from foreword.backends.cuda.kernels.rows import norm_heads
    from foreword.backends.torch.norms import rms_norm

    qkv, norms = random(3, 100, dtype=dtype), (random(60, dtype=dtype), random(20, dtype=dtype))
    q, k, v = (part.clone() for part in qkv.split([60, 20, 20], dim=1))
    norm_heads(qkv, norms, EPS)
    assert close(qkv[:, :60], rms_norm(q, norms[0], EPS), dtype)
    assert close(qkv[:, 60:80], rms_norm(k, norms[1], EPS), dtype)
    assert torch.equal(qkv[:, 80:], v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turned", [20, 12, 0])
def test_rotation_with_the_write_to_kv_memory(turned: int, normed: bool, dtype: torch.dtype):
    from foreword.backends.cuda.kernels.rotation import rotate_and_store
    from foreword.backends.torch.norms import rms_norm
    from foreword.models.rope import rotate

    rows, heads, kv_heads, dim = 4, 15, 2, 20  # more heads than one program rotates
    qkv, slots = random(rows, heads + 2 * kv_heads, dim, dtype=dtype), ints([3, 0, 7, 5])
    angles = random(rows, turned // 2)
    norms = (random(dim, dtype=dtype), random(dim, dtype=dtype)) if normed else None
    keys, values = poison(8, kv_heads, dim, dtype=dtype), poison(8, kv_heads, dim, dtype=dtype)
    queries = poison(rows, heads, dim, dtype=dtype)
    rotate_and_store(qkv, (angles.cos(), angles.sin()), slots, norms, EPS, keys, values, queries)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], EPS), rms_norm(k, norms[1], EPS)
    cos_sin = angles.cos().to(dtype), angles.sin().to(dtype)
    assert close(queries, rotate(q, *cos_sin), dtype)
    assert close(keys[slots.long()], rotate(k, *cos_sin), dtype)
    assert torch.equal(values[slots.long()], v)
    untouched = [slot for slot in range(8) if slot not in slots.tolist()]
    assert keys[untouched].isnan().all() and values[untouched].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_are_the_others_in_8_bits(dtype: torch.dtype):
    from foreword.backends.cuda.kernels.rotation import rotate_and_store

    rows, heads, kv_heads, dim = 4, 15, 2, 20
    qkv, slots = random(rows, heads + 2 * kv_heads, dim, dtype=dtype), ints([3, 0, 7, 5])
    angles, norms = random(rows, dim // 2), (random(dim, dtype=dtype), random(dim, dtype=dtype))

    def kept(*memory: Tensor) -> tuple[Tensor, ...]:
        queries = poison(rows, heads, dim, dtype=dtype)
        rotate_and_store(qkv, (angles.cos(), angles.sin()), slots, norms, EPS, *memory, queries)
        return queries, *memory

    plain = kept(*(poison(8, kv_heads, dim, dtype=dtype) for _ in range(2)))
    packed = kept(*(packed_rows(random(8, kv_heads, dim))[0].fill_(77) for _ in range(2)))
    assert torch.equal(packed[0], plain[0])
    for found, numbers in zip(packed[1:], plain[1:], strict=True):
        expected, _ = packed_rows(numbers[slots.long()])
        bytes_apart = (found[slots.long()].int() - expected.int()).abs().flatten(1)
        assert (bytes_apart[:, : kv_heads * dim] <= 1).all(), "a number between two may go either way"
        scales = [
            memory.flatten(1)[:, kv_heads * dim :].contiguous().view(torch.float32)
            for memory in (found[slots.long()], expected)
        ]
        torch.testing.assert_close(*scales, rtol=1e-6, atol=0)
        assert (found[[1, 2, 4, 6]] == 77).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_embedding_and_rows(dtype: torch.dtype):
    from foreword.backends.cuda.kernels.rows import activate, as_logits, take_rows
    from foreword.backends.torch.layers import ACTIVATIONS

    gate_up = random(3, 2 * 1100, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    for name, function in ACTIVATIONS.items():
        found = activate(gate_up, poison(3, 1100, dtype=dtype), None, name)
        assert close(found, function(gate) * up, dtype)
        found = activate(gate_up, poison(3, 2200, dtype=dtype), None, name)
        assert close(found, function(gate_up), dtype), "without a gate"
    table, ids = random(9, 36, dtype=dtype), ints([8, 0, 3, 3])
    assert torch.equal(take_rows(table, ids), table[ids.long()])
    assert torch.equal(take_rows(table, ids, scale=3.0), table[ids.long()] * 3)
    assert torch.equal(as_logits(gate_up), gate_up.float())
    assert close(as_logits(gate_up, 0.5, 2.0), 2 * torch.tanh(gate_up.float() * 0.25), torch.float32)


def test_ids_that_stand_for_drawn_tokens_are_replaced():
    """An id of -1 - n stands for the n-th draw; a row that drew nothing is read as token 0."""
    from foreword.backends.cuda.kernels.rows import fill_in

    ids = ints([*range(300)])  # more than one program takes
    ids[[1, 4, 299]] = ints([-3, -1, -2])
    expected = ids.clone()
    expected[[1, 4, 299]] = ints([9, 5, 0])
    fill_in(ids, torch.tensor([5, -1, 9], device=KERNEL_DEVICE))
    assert torch.equal(ids, expected)


def test_moves_read_everything_before_they_write():
    from foreword.backends.cuda.kernels.moves import move_rows

    memory = random(2, 10, 3, 8)
    expected = memory.clone()
    copies = ints([[1, 2], [2, 3], [5, 5], [3, 1]])
    expected[:, copies[:, 1].long()] = memory[:, copies[:, 0].long()]
    move_rows(memory, copies)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_moves_take_keys_and_values_of_every_kind_along(packed: bool):
    from foreword.backends.cuda.kernels.moves import move_rows
    from foreword.backends.torch.kv_store import TorchKvStore
    from foreword.kv.spec import DECODER_ROWS, PageSpec, RowSpec

    kinds = RowSpec(DECODER_ROWS, 2, 2, 4, packed=packed), RowSpec("head", 1, 1, 6)
    store = TorchKvStore(PageSpec.of(kinds[0], kinds[1:]), 2, 4, KERNEL_DEVICE, move_rows)
    arrays = [memory for kind in kinds for memory in store.arrays(kind.name)]
    assert store.bytes_per_row * 10 == sum(memory.nbytes for memory in arrays)
    for memory in arrays:
        memory.copy_(random(*memory.shape) * 50 + 100)
    before = [memory.clone() for memory in arrays]
    store.move(ints([[6, 1], [1, 3]]))
    for memory, was in zip(arrays, before, strict=True):
        was[:, [1, 3]] = was[:, [6, 1]]
        assert torch.equal(memory, was)


def test_a_tile_fits_into_the_shared_memory_that_there_is():
    from foreword.backends.cuda.kernels.linear import Tile

    tile = Tile(64, 64, 128, stages=6)
    assert tile.within(232_448, 2) == tile
    assert tile.within(232_448, 4) == Tile(64, 64, 128, stages=4)
    assert Tile(32, 32, 512).within(101_376, 4) == Tile(32, 32, 256, stages=2)
