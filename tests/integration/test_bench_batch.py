"""`foreword bench batch` on a tiny model."""

from pathlib import Path

import pytest

from foreword import LLM
from foreword.bench.batch import measure_batches
from foreword.bench.batch_runs import run_batch
from foreword.errors import RequestError


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    return LLM(str(tiny_model), dtype="float32", device="cpu", speculation=speculation)


def test_every_batch_is_measured_plain_and_speculative(llm: LLM):
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9]]
    rows = measure_batches(llm.engine, prompts, [1, 3], 6, 1, lambda *_: None)
    assert [row.batch for row in rows] == [1, 3]
    assert rows[0].scaling == 1.0
    for row in rows:
        assert row.tokens_per_pass >= 1
        assert 0 <= row.acceptance <= 1
        assert row.speedup > 0
        assert 0 < row.plain_host_ms < row.plain_token_ms
    assert not llm.engine.has_requests
    assert llm.engine.cache.available_pages == llm.engine.cache.pool.num_pages


def test_plain_runs_guess_nothing_and_gain_what_was_asked(llm: LLM):
    plain = run_batch(llm.engine, [[1, 2, 3], [4, 5]], 5, speculate=False)
    assert (plain.tokens, plain.steps, plain.drafted) == (10, 5, 0)
    guessing = run_batch(llm.engine, [[1, 2, 3], [4, 5]], 5, speculate=True)
    assert guessing.tokens >= 10
    assert guessing.drafted > 0


def test_what_cannot_be_measured_is_refused(llm: LLM, tiny_model: Path):
    with pytest.raises(RequestError, match="lower --tokens"):
        run_batch(llm.engine, [[1] * 400], 100, speculate=False)
    with pytest.raises(RequestError, match="at least"):
        measure_batches(llm.engine, [[1]], [0], 4, 1, lambda *_: None)
    plain = LLM(str(tiny_model), dtype="float32", device="cpu")
    with pytest.raises(RequestError, match="speculative configuration"):
        measure_batches(plain.engine, [[1]], [1], 4, 1, lambda *_: None)
