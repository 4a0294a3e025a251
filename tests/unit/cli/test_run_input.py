"""`foreword run` with piped input: one prompt."""

import io
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from foreword.cli.chat import main as chat
from helpers.command_line import assert_one_line_error, refusal


@pytest.fixture
def planned(monkeypatch) -> list[str]:
    seen: list[str] = []

    @contextmanager
    def session(model, options):
        yield SimpleNamespace(plan=seen.append), None

    monkeypatch.setattr(chat, "_session", session)
    monkeypatch.setattr(chat, "_answer", lambda *_: None)
    return seen


@pytest.mark.parametrize(
    ("arguments", "piped", "prompt"),
    [
        ((), "the sky\n\n the sea\n", "the sky\n\n the sea"),
        (("Sum it up.",), "the sky\r\n", "the sky\nSum it up."),
        (("Sum up:",), "", "Sum up:"),
    ],
)
def test_all_of_the_input_is_one_prompt_before_the_argument(monkeypatch, planned, arguments, piped, prompt):
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    assert refusal("run", "smollm2-135m", *arguments).returncode == 0
    assert planned == [prompt]


def test_no_prompt_at_all_is_refused_before_the_model_is_loaded(monkeypatch, planned):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert_one_line_error(refusal("run", "smollm2-135m"), "the prompt is empty")
    assert planned == []


def test_a_terminal_is_not_read_to_its_end(monkeypatch, planned):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert refusal("run", "smollm2-135m", "Hello").returncode == 0
    assert planned == ["Hello"]
