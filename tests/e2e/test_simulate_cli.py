"""`foreword simulate` as a user runs it."""

import json
from pathlib import Path

from helpers.command_line import assert_one_line_error, foreword, refusal

SMALL = ("simulate", "--targets", "2", "--nodes", "1", "--batch", "2", "--seconds", "1", "--answer", "16")


def test_table_object_and_page(tmp_path: Path):
    step, page = tmp_path / "step.json", tmp_path / "page.html"
    rows = [{"n": 1, "ms": 20.0}, {"n": 8, "ms": 24.0}]
    step.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    run = foreword(*SMALL, "--step", str(step), "--page", str(page), "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert list(found["ways"]) == ["plain", "local", "remote", "no run-ahead"]
    assert found["ways"]["plain"]["tokens_per_pass"] == 1
    assert found["measured"] == {"steps": str(step)}
    assert len(found["sweep"]) == (3 + 4 * 5) * 4  # two targets have three ratios
    assert "illustrative, not measured: acceptance" in run.stderr
    assert "passes of up to 12 tokens are extrapolated from those measured, up to 8" in run.stderr
    assert page.read_text(encoding="utf-8").count("<svg") == 2 + 5 * 3


def test_a_goal_is_searched_for():
    run = foreword(*SMALL, "--goal-tokens-per-second", "1", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["goal"] == {"tokens_per_second": 1.0, "token_ms_p95": None}
    assert [(answer["who"], answer["fleet"]["targets"]) for answer in found["answers"]] == [
        ("plain", 1),
        ("local", 1),
        ("remote", 1),
    ]
    assert "plain: 1 target, 10 an hour, the cheapest" in run.stderr
    run = foreword(*SMALL, "--goal-p95-ms", "0.1", "--goal-vary", "nodes", "--goal-most", "2")
    assert run.returncode == 1
    assert "remote: not reached: p95" in run.stdout


def test_errors_are_one_line(tmp_path: Path):
    assert_one_line_error(refusal(*SMALL, "--fail", "explode"), "--fail", "kill:2@10+5")
    assert_one_line_error(refusal(*SMALL, "--rate", "many"), "--rate")
    for rate in ("nan", "inf", "1e9"):
        assert_one_line_error(refusal(*SMALL, "--rate", rate), "--rate", "above 0")
    assert_one_line_error(refusal(*SMALL, "--level-ms", "inf"), "--level-ms", "not inf")
    assert_one_line_error(refusal(*SMALL, "--method", "suffix"), "--method suffix", "give --drafters")
    assert_one_line_error(refusal(*SMALL, "--waiting", "long"), "--waiting", "worth")
    assert_one_line_error(refusal(*SMALL, "--zone-ms", "3"), "--zone-ms", "--zones 2")
    assert_one_line_error(refusal(*SMALL, "--boot-s", "3"), "--boot-s", "--autoscale")
    assert_one_line_error(refusal(*SMALL, "--link", str(tmp_path / "none")), "--link", "cannot be read")
    assert_one_line_error(refusal(*SMALL, "--page", str(tmp_path / "a" / "b")), "--page", "no directory")
