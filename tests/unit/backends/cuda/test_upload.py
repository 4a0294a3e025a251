"""Passes on their way to the device: every array arrives, where a captured pass of its shape reads it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword.speculation.draft import Draft
from helpers.cuda import KERNEL_DEVICE, comparable_numbers, needs_triton
from unit.backends.cuda.test_layout import laid_out

pytestmark = needs_triton

SPARE = 9999
BY_ROW = ("token_ids", "positions", "slots", "prefix_lens", "ancestor_masks")


def small_pass(moves: list[list[int]], adapters: tuple[int, ...]) -> tuple[Any, Any]:
    """Two requests of three rows each: 6 rows, which are padded to 8."""
    from foreword.backends.cuda.layout import Layout

    batch, _ = laid_out([1, 1], [Draft.chain([1, 2], 1)] * 2, 4)
    copies = torch.tensor(moves, dtype=torch.int32).reshape(-1, 2)
    batch = replace(batch, kv_copies=copies, adapters=adapters)
    return batch, Layout.of(batch, 16, 4, 1)


@pytest.mark.parametrize("adapters", [(), (0, 3)])
def test_passes_of_one_shape_lie_in_one_place_whatever_they_move(adapters: tuple[int, ...]):
    from foreword.backends.cuda.upload import PassUpload

    upload, places = PassUpload(KERNEL_DEVICE), set()
    for moves in ([], [[3, 4]], [], [[1, 2], [5, 6]], [[7, 8]]):
        batch, layout = small_pass(moves, adapters)
        sent = upload.send(batch, layout, SPARE)
        assert sent.is_fixed
        assert sent.batch.kv_copies.tolist() == moves
        for name in BY_ROW:
            found, expected = getattr(sent.batch, name), getattr(batch, name)
            assert len(found) == layout.shape.rows == 8
            assert found[:6].tolist() == expected.tolist(), name
        assert sent.batch.slots[6:].tolist() == [SPARE] * 2, "padding writes to no request's rows"
        assert (
            sent.batch.block_tables[:2, : batch.block_tables.shape[1]].tolist() == batch.block_tables.tolist()
        )
        assert sent.requests.tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
        assert sent.adapters.tolist() == ([0, 0, 0, 3, 3, 3, 0, 0] if adapters else [])
        assert sent.tiles.narrow is not None and sent.tiles.wide is None
        assert sent.tiles.narrow.counts.tolist() == [3, 3]
        places.add(tuple(getattr(sent.batch, name).data_ptr() for name in BY_ROW))
    assert len(places) == 1, "a captured pass reads from there"


def test_every_store_has_captures_of_its_own():
    from foreword.backends.cuda.graphs import GraphsByMemory

    class Store: ...

    graphs: GraphsByMemory[Any, Any] = GraphsByMemory()
    stores: list[Any] = [Store(), Store()]
    first, second = (graphs.of(store) for store in stores)
    assert first is not second
    assert [graphs.of(store) for store in stores] == [first, second]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_product_in_parts_has_its_bias_and_what_adapters_add(biased: bool, adapted: bool):
    from foreword.backends.cuda.layers import CudaLayers
    from foreword.backends.cuda.packed_products import Rows
    from foreword.backends.cuda.products import Products, added_up

    class Added:
        def add(self, place: Any, x: Tensor, y: Tensor) -> Tensor:
            assert place == (1, range(3, 4)) and len(x) == len(y)
            return y + 8

    x, weight, bias = comparable_numbers(3, 64), comparable_numbers(20, 64), comparable_numbers(20)
    layers: Any = SimpleNamespace(_products=Products(least_part=16))
    adapters: Any = Added() if adapted else None
    found = CudaLayers._addend(layers, Rows(x), weight, bias if biased else None, adapters, (1, range(3, 4)))
    expected = x @ weight.T + (bias if biased else 0) + (8 if adapted else 0)
    assert found.ndim == (2 if biased or adapted else 3), "parts are added up with the stream's"
    torch.testing.assert_close(added_up(found) if found.ndim == 3 else found, expected, rtol=1e-5, atol=1e-4)
