"""What adapters add, row by row: the numbers of plain products, and the same bits in any company."""

import pytest
import torch
from torch import Tensor

from foreword.models.adapters import MODULES, Factors, Lora
from helpers.adapters import ADAPTED
from helpers.cuda import KERNEL_DEVICE, comparable_numbers, needs_triton

pytestmark = needs_triton

WIDTHS, DEPTH = (150, 40, 40), 300
DTYPES = [torch.float32, *([torch.bfloat16] if KERNEL_DEVICE.type == "cuda" else [])]


def factors(rank: int, width: int, dtype: torch.dtype) -> Factors:
    down = comparable_numbers(rank, DEPTH, dtype=dtype) * 2.0**-4
    return Factors(down, comparable_numbers(width, rank, dtype=dtype))


def adapters(dtype: torch.dtype) -> dict[int, Lora]:
    """Of every rank, one of them for a part of the modules."""
    chosen = {1: (17, (0, 1, 2)), 3: (128, (1,)), 4: (1, (0, 2))}
    return {
        slot: Lora({(1, MODULES[part]): factors(rank, WIDTHS[part], dtype) for part in parts})
        for slot, (rank, parts) in chosen.items()
    }


def added(loaded: dict[int, Lora], x: Tensor, y: Tensor, slots: list[int]) -> Tensor:
    from foreword.backends.cuda.adapters import AdapterTable
    from foreword.backends.cuda.kernels.adapters import add_factors

    table = AdapterTable(ADAPTED, KERNEL_DEVICE)
    for slot, adapter in loaded.items():
        table.set(slot, adapter)
    rows = torch.tensor(slots, dtype=torch.int32, device=KERNEL_DEVICE)
    return add_factors(x, y.clone(), rows, table.entries, (1, 0), WIDTHS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_has_what_its_own_adapter_adds(dtype: torch.dtype):
    loaded, slots = adapters(dtype), [1, 0, 3, 4, 1, 2]
    x = comparable_numbers(len(slots), DEPTH, dtype=dtype)
    y = comparable_numbers(len(slots), sum(WIDTHS), dtype=dtype)
    found = added(loaded, x, y, slots)
    expected = y.float().clone()
    for row, slot in enumerate(slots):
        begin = 0
        for part, width in enumerate(WIDTHS):
            one = loaded[slot].factors.get((1, MODULES[part])) if slot in loaded else None
            if one is not None:
                expected[row, begin : begin + width] += one.up.float() @ (one.down.float() @ x[row].float())
            begin += width
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(found[[1, 5]], y[[1, 5]])
    for row, slot in enumerate(slots):
        assert torch.equal(added(loaded, x[row : row + 1], y[row : row + 1], [slot])[0], found[row])


def test_an_adapter_that_has_left_adds_nothing():
    from foreword.backends.cuda.adapters import AdapterTable

    table = AdapterTable(ADAPTED, KERNEL_DEVICE)
    table.set(1, adapters(torch.float32)[1])
    assert table.entries[1].any()
    table.set(1, None)
    assert not table.entries.any()


def test_modules_side_by_side_have_their_own_factors():
    """Those of the MLP lie after the attention's in the table; their input takes more than one load."""
    from foreword.backends.cuda.adapters import GATE_UP, AdapterTable, RowAdapters

    table, depth = AdapterTable(ADAPTED, KERNEL_DEVICE), 1100
    widths = [table.widths[0][MODULES[module]] for module in GATE_UP]
    own = [Factors(comparable_numbers(2, depth), comparable_numbers(width, 2)) for width in widths]
    table.set(2, Lora({(0, MODULES[module]): one for module, one in zip(GATE_UP, own, strict=True)}))
    slots = torch.tensor([0, 2], dtype=torch.int32, device=KERNEL_DEVICE)
    x, y = comparable_numbers(2, depth), comparable_numbers(2, sum(widths))
    expected = y.clone()
    expected[1] += torch.cat([one.up @ (one.down @ x[1]) for one in own])
    found = RowAdapters(table, slots).add((0, GATE_UP), x, y)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
