"""`foreword theory` and the pictures of `foreword bench` as a user runs them."""

import importlib.util
import json
from pathlib import Path

import pytest

from helpers.command_line import assert_one_line_error, foreword, refusal


def last_object(run) -> dict:
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def assert_plotted(run, picture: Path) -> None:
    """The picture is there, or one line says what it takes."""
    if importlib.util.find_spec("matplotlib") is None:
        assert_one_line_error(run, "matplotlib", "foreword[plot]")
    else:
        assert run.returncode == 0, run.stderr
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_and_the_object_say_the_same():
    run = foreword("theory", "--alpha", "0.8", "--draft-cost", "0.05", "--k", "1..15", "--json")
    found = last_object(run)["closed_form"]
    assert found["best_k"] == 8
    assert found["best_speedup"] == pytest.approx((1 - 0.8**9) / 0.2 / 1.4)
    assert (found["break_even"], found["break_even_k"]) == (pytest.approx(0.05), 1)
    assert [row["k"] for row in found["rows"]] == list(range(1, 16))
    assert "best k is 8, 3.09×" in run.stderr
    assert "measured" not in run.stderr


def test_measured_steps_stand_beside_the_closed_form(tiny_model: Path, tmp_path: Path):
    steps = foreword("bench", "step", "--model", str(tiny_model), "--tokens", "1,4", "--repeats", "1",
                     "--context", "20", "--json")  # fmt: skip
    costs = tmp_path / "costs.txt"
    costs.write_text(steps.stdout)  # as `> costs.txt` leaves it
    options = ["theory", "--step-costs", str(costs), "--json"]
    found = last_object(foreword(*options, "--k", "1..3"))
    ratio = last_object(steps)["rows"][1]["ratio"]
    assert found["measured_steps"]["rows"][2]["cost"] == pytest.approx(3 * 0.05 + ratio)
    assert found["closed_form"]["rows"][2]["cost"] == pytest.approx(1.15)
    assert_one_line_error(refusal(*options, "--k", "1..4"), "4 draft tokens need 5", "bench step")


def test_a_drafter_elsewhere_and_trees():
    options = ["--alpha", "0.8", "--k", "4", "--network-cost", "0.5", "--tree-width", "2"]
    run = foreword("theory", *options, "--json")
    (row,) = last_object(run)["closed_form"]["rows"]
    assert row["cost"] == pytest.approx(4 * 0.05 + 0.5 + 1)
    assert row["nodes"] == 8
    assert "a round trip 0.5" in run.stderr


def test_bad_numbers_are_one_line():
    assert_one_line_error(refusal("theory", "--network-cost", "-1"), "--network-cost")
    assert_one_line_error(refusal("theory", "--alpha", "1.5"), "--alpha")
    assert_one_line_error(refusal("theory", "--draft-cost", "-1"), "--draft-cost")
    assert_one_line_error(refusal("theory", "--k", "x"), "--k")


def test_pictures(tiny_model: Path, tmp_path: Path):
    model = ["--model", str(tiny_model)]
    commands = {
        "theory": ["theory", "--k", "1..8"],
        "step": ["bench", "step", *model, "--tokens", "1,2", "--repeats", "1", "--context", "20"],
        "batch": ["bench", "batch", *model, "--batches", "1,2", "--tokens", "2", "--repeats", "1"],
    }
    for name, command in commands.items():
        picture = tmp_path / f"{name}.png"
        assert_plotted(foreword(*command, "--plot", str(picture)), picture)
