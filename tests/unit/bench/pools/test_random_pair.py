"""A pair with random weights is one that can be measured: the draft mostly says what the target says."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from foreword import LLM
from foreword.bench.pools import PLAIN, measure_pools, ways_of_drafting
from foreword.bench.random_models import SHAPES, write_agreeing_pair, write_random_pair
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig


def shape(hidden: int, layers: int) -> ModelConfig:
    layer = LayerSpec(AttentionSpec(4, 2, 16), MlpSpec(96))
    return replace(SHAPES["llama-1b"], vocab_size=400, hidden_size=hidden, layers=(layer,) * layers)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_random_pair(shape(64, 4), 1, tmp_path_factory.mktemp("pair"))


def test_the_draft_is_measured_beside_plain_decoding_and_mostly_right(pair: tuple[Path, Path]):
    target, draft = map(str, pair)
    llm = LLM(target, device="cpu")
    seen: list[tuple[str, int, int]] = []
    with ExitStack() as nodes:
        ways = ways_of_drafting(draft, [], 3, nodes)
        rows = measure_pools(
            llm.engine,
            ways,
            [[5, 6, 7], [8, 9]],
            batches=[1, 3],
            tokens=8,
            repeats=1,
            progress=lambda *stage: seen.append(stage),
        )
    assert [(row.way, row.batch) for row in rows] == [
        (way, batch) for batch in (1, 3) for way in (PLAIN, "beside the target")
    ]
    plain, beside = rows[2:]
    assert (plain.tokens_per_pass, plain.over_plain) == (1.0, 1.0)
    assert beside.tokens_per_pass > 2
    assert [place for _, place, _ in seen] == list(range(1, 9))


@pytest.mark.parametrize(("agreement", "least", "most"), [(0.0, 1.0, 1.0), (0.8, 2.2, 3.6), (1.0, 4.0, 4.0)])
def test_a_draft_of_another_shape_agrees_as_often_as_is_said(
    tmp_path: Path, agreement: float, least: float, most: float
):
    target, draft = write_agreeing_pair(shape(64, 3), shape(48, 2), agreement, tmp_path)
    llm = LLM(str(target), device="cpu")
    (row,) = measure_pools(
        llm.engine,
        {PLAIN: {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, "fixed": True}},
        [[number] for number in range(16)],
        batches=[16],
        tokens=16,
        repeats=1,
        progress=lambda *_: None,
    )
    assert least <= row.tokens_per_pass <= most
    llm.close()


@pytest.mark.slow
def test_nodes_draft_as_well_and_may_run_ahead_or_not(pair: tuple[Path, Path]):
    target, draft = map(str, pair)
    llm = LLM(target, device="cpu")
    with ExitStack() as nodes:
        ways = ways_of_drafting(draft, ["cpu"], 3, nodes, run_ahead=[True, False])
        rows = measure_pools(
            llm.engine, ways, [[5, 6, 7]], batches=[1], tokens=24, repeats=1, progress=lambda *_: None
        )
    assert [row.way for row in rows[2:]] == ["node on cpu", "node on cpu, no run-ahead"]
    assert all(row.tokens_per_pass > 1 for row in rows[2:])
    llm.close()
