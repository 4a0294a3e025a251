"""Every example runs, on a tiny model."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_there_are_ten():
    assert len(EXAMPLES) == 10


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, tiny_model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), str(tiny_model)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
