"""Random heads of the drafter benchmark: every kind can be opened, and their figures are told apart."""

from dataclasses import replace
from pathlib import Path

import pytest

from foreword.bench.drafters.decode import Record
from foreword.bench.drafters.summary import drafter_table, summarise
from foreword.bench.methods import default_methods, is_random, parse_methods
from foreword.bench.random_heads import write_random_head
from foreword.errors import RequestError
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec
from foreword.models.heads.opening import open_head
from helpers.bench_runs import PLAIN_RUN

LAYER = LayerSpec(AttentionSpec(4, 2, 16, bias=True, qk_norm=True), MlpSpec(96))
TARGET = ModelConfig("qwen3", 360, 64, 512, (LAYER,) * 6, NormSpec(1e-5), RopeSpec(10000.0), True)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "p_eagle", "mtp", "medusa", "dflash", "dspark"])
def test_a_random_head_fits_its_target(tmp_path: Path, method: str):
    head = open_head(write_random_head(method, TARGET, tmp_path / method))
    assert head.spec.kind == method
    assert head.fitted(TARGET).spec.boundaries


def test_others_have_none(tmp_path: Path):
    with pytest.raises(RequestError, match="no random model for 'ngram'"):
        write_random_head("ngram", TARGET, tmp_path / "head")
    with pytest.raises(RequestError, match="needs its method"):
        parse_methods('{"model": "random"}')


def test_heads_are_measured_when_they_are_named():
    labels = {method.label for method in default_methods()}
    assert not labels & {"eagle", "eagle3", "mtp", "medusa", "p_eagle", "dflash", "dspark"}


def test_what_a_random_head_guesses_is_not_told():
    (method,) = parse_methods('{"method": "eagle3", "model": "random"}')
    assert is_random(method.label)
    run = replace(PLAIN_RUN, tokens=2, passes=2, drafted=10, seconds=1.0, draft_seconds=0.2)
    rows = summarise([Record(name, "p", "chat", run, run) for name in (method.label, "ngram")])
    table = drafter_table(rows, "title")
    taus = list(table.columns[3].cells)
    assert taus == ["", "-", "-", "", "1.00", "1.00"]
    assert "random weights" in str(table.caption)
    assert "random weights" not in str(drafter_table(rows[2:], "title").caption)
