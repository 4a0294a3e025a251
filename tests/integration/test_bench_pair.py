"""A pair of models measured: a copy of the target as its draft, and a noisy one."""

import json
from pathlib import Path

import pytest

from foreword.bench.pair import PLAIN, RULES, TEMPERATURES, PairBench, PairSettings, merged
from foreword.bench.prompts import BenchPrompt
from foreword.engine.loader import load_model
from helpers.command_line import assert_one_line_error, foreword
from helpers.drafted_answers import noisy_copy

PROMPTS = [BenchPrompt("1", "chat", "the sky is"), BenchPrompt("2", "code", "def add(a, b):")]


@pytest.fixture(scope="module")
def noisy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy_copy(tiny_model, tmp_path_factory.mktemp("pair") / "draft")


def measured(target: Path, draft: Path):
    models = [load_model(str(path), dtype="float32") for path in (target, draft)]
    bench = PairBench(models[0], models[1], str(draft), PairSettings(max_tokens=8, guesses=3))
    return bench.run(PROMPTS, lambda stage, done, whole: None)


def test_a_copy_of_the_target_is_no_distance_away_and_always_right(tiny_model):
    divergences, runs = measured(tiny_model, tiny_model)
    assert len(divergences) == len(TEMPERATURES) * 2
    for row in divergences:
        assert row.divergence.tv < 1e-4
        assert row.divergence.coupled > 0.999
    for row in merged(runs, by_kind=False):
        if row.rule != PLAIN:
            assert row.run.per_position[0] > 0.9, row


def test_a_noisy_copy_is_some_way_off(tiny_model, noisy):
    divergences, runs = measured(tiny_model, noisy)
    warm = [row.divergence for row in divergences if row.temperature == 1]
    assert all(0.01 < found.tv < 0.9 for found in warm)
    assert all(found.token >= found.coupled - 1e-9 for found in warm)
    assert {run.rule for run in runs} == {PLAIN, *RULES}


@pytest.mark.slow
def test_the_command_tells_all_of_it(tiny_model, noisy):
    run = foreword("prove", "--pair", str(tiny_model), str(noisy), "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert {row["temperature"] for row in found["divergences"]} == set(TEMPERATURES)
    assert {row["rule"] for row in found["expected"]} == set(RULES)
    assert all(row["speedup"] > 0 for row in found["expected"])


def test_two_proofs_at_once_are_refused():
    run = foreword("prove", "--pair", "a", "b", "--url", "http://127.0.0.1:1")
    assert_one_line_error(run, "--url and --pair exclude each other")
