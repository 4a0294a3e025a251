"""The outer factors of adapters on every instruction set."""

import numpy as np
import pytest

from helpers.cpu import INSTRUCTION_SETS, needs_cpu_kernels

pytestmark = needs_cpu_kernels


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (8, 16), (9, 17), (75, 32), (61, 33), (40, 128)])
def test_a_factor_is_rounded_by_row_and_multiplies_rounded_rows(isa: str, rows: int, rank: int):
    from foreword.kernels._native import Arena, PackedMatrix

    rng = np.random.default_rng(rows)
    values = rng.standard_normal((rows, rank)).astype(np.float32) * rng.uniform(0.01, 5, (rows, 1)).astype(
        "f4"
    )
    values[0] = 0.0
    matrix = PackedMatrix.round_factor(Arena(), values)
    expanded = np.empty((rows, rank), dtype=np.float32)
    for row in range(rows):
        matrix.expand_row(row, expanded[row], isa)
    step = np.abs(values).max(axis=1, keepdims=True) / 127
    assert (np.abs(expanded - values) <= 0.501 * step).all()
    x = rng.standard_normal((5, rank)).astype(np.float32)
    out = np.empty((5, rows), dtype=np.float32)
    matrix.multiply(x, out, isa)
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    np.testing.assert_allclose(out, np.rint(x / scale) * scale @ expanded.T, rtol=1e-4, atol=1e-4)
    alone = np.empty((1, rows), dtype=np.float32)
    matrix.multiply(x[3:4].copy(), alone, isa)
    np.testing.assert_array_equal(alone[0], out[3])


def test_a_factor_has_at_most_128_columns():
    from foreword.kernels._native import Arena, PackedMatrix

    with pytest.raises(ValueError, match="1 to 128 columns"):
        PackedMatrix.round_factor(Arena(), np.zeros((3, 129), dtype=np.float32))
