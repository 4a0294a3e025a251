"""`foreword bench learn` on a tiny model: a version is trained on the traffic, and compared."""

import json
from pathlib import Path

from helpers.command_line import foreword
from helpers.tiny_models import make_hf_model

SMALL = ("--before", "6", "--requests", "24", "--round-requests", "8", "--rounds", "1", "--held-out", "2")
SIZES = ("--tokens", "40", "--learn-min-tokens", "600")


def test_a_head_is_trained_on_the_traffic_and_compared(tmp_path: Path):
    model = make_hf_model(tmp_path / "long", max_position_embeddings=4096)
    run = foreword("bench", "learn", "--model", str(model), *SMALL, *SIZES, "--json")
    assert run.returncode == 0, run.stderr
    reported = json.loads(run.stdout)
    shift = reported["shift"]
    assert 8 <= shift["requests"] <= 24
    assert shift["trained_seconds"] > 0
    assert shift["stage"].startswith("version 1: ")
    assert shift["same_texts"] == shift["compared_texts"] == 8 * shift["rounds"]
    general, sql = reported["rows"]
    assert (general["kind"], sql["kind"]) == ("general", "sql")
    for row in (general, sql):
        assert row["static"] == 1.0, "the model has no head at the start"
        assert row["learned"] >= 1.0
        assert row["same_texts"] == row["answers"] == 2


def test_options_without_sense_are_refused_before_a_model_is_loaded(tmp_path: Path):
    for options, words in (
        (("--shift", "poems"), "--shift must be one of sql, mail, german"),
        (("--utilization", "1"), "--utilization must be above 0 and below 1"),
    ):
        run = foreword("bench", "learn", "--model", str(tmp_path), *options)
        assert run.returncode == 2
        assert words in run.stderr
