"""Engines beside each other in processes of their own."""

import json
import os
import sys
from dataclasses import asdict

import pytest

from foreword.bench import compare
from foreword.bench import contestants as listed
from foreword.bench.compare import PeerAnswer, Race
from foreword.bench.contestants import Contestant, PeerKind
from foreword.bench.ledger import restored
from helpers.command_line import assert_one_line_error, foreword, refusal


class Counting:
    """An engine that counts from the prompt's last token on, two tokens at a time."""

    def __init__(self, model: str, mode: str, threads: int, device: str) -> None:
        if mode == "broken":
            raise ValueError("no such weights")
        if mode == "broken threads":
            raise ValueError(
                f"{os.environ['OMP_NUM_THREADS']} and {os.environ['FOREWORD_THREADS']} of {threads} on {device}"
            )
        print("noise that engines print")

        self._dies = mode == "dies"

    def tokens(self, prompt, count):
        if self._dies and count > 4:
            sys.exit("out of memory")
        for k in range(0, count, 2):
            yield list(range(prompt[-1] + k, prompt[-1] + min(k + 2, count)))


def test_answers_come_from_processes_by_turns(monkeypatch):
    monkeypatch.setitem(
        listed.KINDS, "counting", PeerKind(f"{__name__}:Counting", "json", "json", ("plain", "broken"))
    )
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    ways = [
        Contestant("counting", "plain"),
        Contestant("counting", "broken"),
        Contestant("counting", "plain", sys.executable),
    ]
    race = Race("model", [[5], [9]], count=5, rounds=2, threads=1)
    answers, absent = race.run(ways, lambda stage, done, whole: None)
    assert [(a.round, a.prompt) for a in answers] == [
        (0, 0),
        (0, 0),
        (0, 1),
        (0, 1),
        (1, 0),
        (1, 0),
        (1, 1),
        (1, 1),
    ]
    assert answers[0].token_ids == (5, 6, 7, 8, 9)
    assert answers[0].first_tokens == 2
    assert 0 < answers[0].first_seconds <= answers[0].seconds
    assert answers[0].peak_bytes > 2**20
    assert absent == ["counting broken cannot be compared: ValueError: no such weights"]


def test_an_interrupted_race_continues_and_an_engine_that_fails_is_left_out(monkeypatch):
    monkeypatch.setitem(
        listed.KINDS, "counting", PeerKind(f"{__name__}:Counting", "json", "json", ("plain", "dies"))
    )
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    ways = [Contestant("counting", "plain"), Contestant("counting", "dies")]
    race = Race("model", [[5], [9]], count=5, rounds=1, threads=1)
    known = PeerAnswer("counting plain", 0, 0, 5, 1.0, 1, 2.0, 2**20, (1, 2, 3, 4, 5))
    kept, slept = [], []
    monkeypatch.setattr(compare, "sleep", slept.append)
    answers, absent = race.run(ways, lambda stage, done, whole: None, [known], kept.append)
    assert answers[0] == known
    assert [(one.contestant, one.prompt) for one in answers[1:]] == [("counting plain", 1)]
    assert kept == answers[1:]
    # One pause for the answer that is measured, one for the answer that fails.
    assert slept == [compare.ENGINE_PAUSE] * 2
    assert absent == ["counting dies: its process ended without an answer"]
    assert restored(PeerAnswer, json.loads(json.dumps(asdict(kept[0])))) == kept[0]


def test_all_engines_get_the_same_threads_and_device(monkeypatch):
    monkeypatch.setitem(
        listed.KINDS, "counting", PeerKind(f"{__name__}:Counting", "json", "json", ("broken threads",))
    )
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setenv("FOREWORD_THREADS", "7")
    race = Race("model", [[5]], count=5, rounds=1, threads=3, device="cuda:1")
    _, absent = race.run([Contestant("counting", "broken threads")], lambda stage, done, whole: None)
    assert absent[0].endswith("ValueError: 3 and 3 of 3 on cuda:1")


@pytest.mark.slow
def test_we_and_transformers_write_the_same_text(tiny_model):
    options = (
        "--category",
        "chat",
        "--limit-per-category",
        "1",
        "--max-tokens",
        "12",
        "--rounds",
        "1",
        "--threads",
        "1",
    )
    model = ("--model", str(tiny_model), "--draft", str(tiny_model))
    run = foreword("bench", "compare", *model, "--peers", "transformers", *options, "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["baseline"] == "transformers plain"
    labels = [row["label"] for row in found["rows"]]
    assert labels == [
        "foreword plain",
        "foreword auto",
        "foreword suffix+ngram",
        "foreword draft_model",
        "transformers plain",
        "transformers prompt lookup",
        "transformers assisted",
    ]
    assert all(row["same_as_plain"] in (None, 1.0) for row in found["rows"]), found["rows"]
    assert all(row["tokens_per_second"] > 0 and row["peak_bytes"] > 0 for row in found["rows"])


@pytest.mark.slow
def test_a_scoreboard_is_measured_and_written(tiny_model, tmp_path):
    compare_options = "--category chat --limit-per-category 1 --max-tokens 8 --rounds 1 --modes plain,auto"
    given = ("--model", str(tiny_model), "--peers", "transformers", "--threads", "1", "--label", "cpu")
    places = ("--results", str(tmp_path / "results"), "--out", str(tmp_path / "page.md"))
    options = ("--measure", *given, *places, "--compare", compare_options, "--prove", "--small --only usage")
    run = foreword("bench", "scoreboard", *options)
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "page.md").read_text("utf-8")
    assert "| foreword auto |" in page
    assert "| transformers plain |" in page
    assert "| usage | held |" in page
    results = sorted(path.name for path in (tmp_path / "results").iterdir())
    stem = f"cpu-{tiny_model.stem}"
    assert results == [f"{stem}-{part}.json" for part in ("proof-foreword", "proof-transformers", "speed")]
    assert "is not measured again" in foreword("bench", "scoreboard", *options).stderr


def test_a_wrong_interpreter_is_refused_in_one_line():
    assert_one_line_error(refusal("bench", "compare", "--python", "vllm=nowhere"), "--python vllm=nowhere")
