"""Prompts from arguments, files and pipes."""

import os
from pathlib import Path

import pytest

from foreword.cli import generate as prompt_input
from foreword.cli.generate import read_prompt
from foreword.errors import RequestError


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch):
    """Makes standard input a pipe that brings this text."""
    opened = []

    def put(text: str, end: bool = True) -> int:
        read, write = os.pipe()
        os.write(write, text.encode())
        if end:
            os.close(write)
        opened.append(os.fdopen(read))
        monkeypatch.setattr("sys.stdin", opened[-1])
        return write

    yield put
    for file in opened:
        file.close()


def test_what_is_piped_in_beside_a_prompt_comes_before_it(pipe, tmp_path: Path):
    pipe("def f(): ...\n")
    assert read_prompt("What does this do?", None) == "def f(): ...\n\nWhat does this do?"
    pipe("def f(): ...")
    (tmp_path / "question").write_text("What does this do?\n")
    assert read_prompt(None, tmp_path / "question") == "def f(): ...\n\nWhat does this do?"
    pipe("")
    assert read_prompt("alone", None) == "alone"


def test_a_redirected_file_is_read_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "code").write_text("x = 1\n")
    with (tmp_path / "code").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert read_prompt("Why?", None) == "x = 1\n\nWhy?"
    assert read_prompt("Why?", None) == "Why?"  # it is closed by now
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert read_prompt("Why?", None) == "Why?"


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_prompt_is_refused_wherever_it_comes_from(pipe, text: str, tmp_path: Path):
    (tmp_path / "empty").write_text(text)
    for prompt, file in (("", None), (None, None), ("-", None), (None, tmp_path / "empty")):
        pipe(text)
        with pytest.raises(RequestError, match="is empty"):
            read_prompt(prompt, file)
    pipe("context")
    with pytest.raises(RequestError, match="the prompt is empty"):
        read_prompt("", None)


def test_standard_input_that_is_the_prediction_is_left_alone(pipe):
    pipe("expected")
    assert read_prompt("Why?", None, stdin_is_free=False) == "Why?"
    with pytest.raises(RequestError, match="both"):
        read_prompt("-", None, stdin_is_free=False)


def test_a_pipe_that_brings_nothing_yet_is_told_of(pipe, monkeypatch: pytest.MonkeyPatch, capsys):
    write = pipe("", end=False)

    def nothing_yet(*_: object) -> tuple[list[object], ...]:
        os.write(write, b"late")
        os.close(write)
        return [], [], []

    monkeypatch.setattr(prompt_input.select, "select", nothing_yet)
    assert read_prompt("Why?", None) == "late\n\nWhy?"
    assert "waiting for standard input" in capsys.readouterr().err
