"""Arguments that no kernel can work with raise ValueError instead of reading outside the arrays."""

import importlib
from typing import Any

import numpy as np
import pytest

from helpers.cpu import INSTRUCTION_SETS, STATUS, needs_cpu_kernels

pytestmark = needs_cpu_kernels
native = importlib.import_module("foreword.kernels._native") if STATUS.available else None

ROWS, VOCAB = 3, 40
SHAPE = {"temperature": 1.0, "top_k": VOCAB, "top_p": 1.0, "min_p": 0.0}


def shape_columns(**changed: Any) -> list[np.ndarray]:
    kinds = {"top_k": np.int64}
    return [np.full(ROWS, value, kinds.get(name, np.float64)) for name, value in (SHAPE | changed).items()]


def logits(rows: int = ROWS, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(rows, vocab)).astype(np.float32)


def sample(values: np.ndarray, columns: list[np.ndarray], guesses: Any = None) -> np.ndarray:
    count = len(columns[0])
    tokens, status = np.empty(count, np.int64), np.empty(count, np.int64)
    stems, positions = np.arange(count, dtype=np.uint64), np.arange(count, dtype=np.int64)
    native.Sampler(1).sample(values, *columns, stems, positions, tokens, status, guesses)
    assert list(status) == [0] * count
    return tokens


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_k": -1}, "top_k must be at least 1"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": float("nan")}, "top_p must be above 0"),
        ({"min_p": -0.5}, "min_p must be in"),
        ({"min_p": float("nan")}, "min_p must be in"),
    ],
)
def test_a_shape_that_keeps_nothing_is_refused(changed: dict[str, float], message: str):
    columns = shape_columns(**changed)
    with pytest.raises(ValueError, match=message):
        sample(logits(), columns)
    floats = [np.empty(ROWS, np.float32) for _ in range(2)]
    with pytest.raises(ValueError, match=message):
        native.Sampler(1).floors(logits(), *columns, *floats, np.empty(ROWS, np.int64))


def test_the_extremes_that_are_allowed():
    for changed in ({"top_k": 1}, {"top_k": 10**15}, {"min_p": 1.0}, {"temperature": 0.0}, {"top_p": 1e-9}):
        assert (sample(logits(), shape_columns(**changed)) >= 0).all()


def test_arrays_that_do_not_fit_the_rows_are_refused():
    with pytest.raises(ValueError, match="do not fit the rows"):
        sample(logits(ROWS + 1), shape_columns())
    with pytest.raises(ValueError, match="no columns"):
        sample(logits(vocab=0), shape_columns())
    with pytest.raises(ValueError, match="not contiguous"):
        sample(logits(vocab=2 * VOCAB)[:, ::2], shape_columns())
    short = np.zeros(ROWS - 1, np.int64)
    floats = [np.zeros(ROWS, np.float32), np.zeros(ROWS, np.float32), np.ones(ROWS)]
    with pytest.raises(ValueError, match="do not fit the rows"):
        native.Sampler(1).draw(logits(), *floats, short, short, short)


@pytest.mark.parametrize("parents", [[-1, -2, 0], [-1, 1, 0], [-1, 0, 2]])
def test_a_draft_token_follows_an_earlier_row(parents: list[int]):
    with pytest.raises(ValueError, match="must follow an earlier row"):
        sample(logits(), shape_columns(), (parents, [0, 0, 0]))


def test_a_sampler_has_threads():
    with pytest.raises(ValueError, match="at least 1"):
        native.Sampler(0)


def test_a_decoder_without_ends_has_no_size():
    sizes = (VOCAB, 8, 8, 2, 1, 4, 1e-5, 1.0, np.ones(2, np.float32), INSTRUCTION_SETS[-1], 1, 1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="no embedding or head"):
        _ = native.Decoder(*sizes).weight_bytes


@pytest.mark.parametrize("gate", [[], [None]])
def test_experts_have_matrices(gate: list[None]):
    matrix = native.PackedMatrix.keep_floats(native.Arena(), np.ones((4, 8), np.float32))
    with pytest.raises(ValueError, match="every expert has three matrices"):
        native.Experts(matrix, gate, [matrix], [matrix], 1, False, False, 1.0, 1, 1, 1, None, None)
