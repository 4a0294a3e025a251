"""The demo on the real model: what it claims, it has checked."""

import re

import pytest

from helpers.command_line import foreword


@pytest.mark.model
def test_the_demo_compares_and_checks():
    run = foreword("demo", "--max-tokens", "64", env={"COLUMNS": "140"})
    assert run.returncode == 0, run.stdout + run.stderr
    assert "MB resident" in run.stdout
    assert "texts are identical" in run.stdout
    lines = [re.findall(r"[^│]+", line) for line in run.stdout.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line] for line in lines]
    passes = {(cells[at - at % 2][0], row[1]): int(row[3]) for at, row in enumerate(cells)}
    assert [kind for kind, _ in passes][::2] == ["repetition", "counting", "a question"]
    assert passes["repetition", "plain"] >= 4 * passes["repetition", "ngram"]


def test_the_demo_fails_if_a_text_changes(monkeypatch: pytest.MonkeyPatch, tiny_model):
    """With a target that answers differently every time."""
    from dataclasses import replace
    from itertools import count

    import typer

    from foreword.bench.drafters import decode as decoding
    from foreword.cli import demo

    real, number = decoding.decode, count()

    def shifty(*arguments, **options):
        return replace(real(*arguments, **options), token_ids=(next(number),))

    monkeypatch.setattr(decoding, "decode", shifty)
    monkeypatch.setattr(demo, "DEFAULT_MODEL", str(tiny_model))
    with pytest.raises(typer.Exit) as caught:
        demo.demo(max_tokens=4)
    assert caught.value.exit_code == 1
