"""The demo on the real model: what it claims, it has checked."""

import re

import pytest

from helpers.command_line import foreword


@pytest.mark.model
def test_the_demo_compares_and_checks():
    run = foreword("demo", "--max-tokens", "64")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "MB resident" in run.stdout
    assert "texts are identical" in run.stdout
    found = re.findall(
        r"^ +(a question|code|arithmetic|) +(plain|eagle3\+ngram) +(\d+) ", run.stdout, re.MULTILINE
    )
    kinds = ("a question", "code", "arithmetic")
    assert [line[:2] for line in found] == [
        row for kind in kinds for row in ((kind, "plain"), ("", "eagle3+ngram"))
    ]
    # How often it guesses depends on what guesses cost here and now.
    plain, guessing = (sum(int(line[2]) for line in found[first::2]) for first in (0, 1))
    assert guessing <= plain


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
    with pytest.raises(typer.Exit) as caught:
        demo.demo(model=str(tiny_model), max_tokens=4)
    assert caught.value.exit_code == 1
