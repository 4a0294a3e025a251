"""A pair with random weights is one that can be measured: the draft mostly says what the target says."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from foreword import LLM
from foreword.bench.gpu.shapes import SHAPES
from foreword.bench.pools.measuring import PLAIN, measure_pools, ways_of_drafting
from foreword.bench.pools.random_pair import write_random_pair
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    layer = LayerSpec(AttentionSpec(4, 2, 16), MlpSpec(96))
    config: ModelConfig = replace(SHAPES["llama-1b"], vocab_size=400, hidden_size=64, layers=(layer,) * 4)
    return write_random_pair(config, 1, tmp_path_factory.mktemp("pair"))


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
    assert [place for _, place, _ in seen] == list(range(8))


@pytest.mark.slow
def test_a_node_drafts_as_well(pair: tuple[Path, Path]):
    target, draft = map(str, pair)
    llm = LLM(target, device="cpu")
    with ExitStack() as nodes:
        ways = ways_of_drafting(draft, ["cpu"], 3, nodes)
        rows = measure_pools(
            llm.engine, ways, [[5, 6, 7]], batches=[1], tokens=24, repeats=1, progress=lambda *_: None
        )
    assert rows[-1].way == "node on cpu"
    assert rows[-1].tokens_per_pass > 1
    llm.close()
