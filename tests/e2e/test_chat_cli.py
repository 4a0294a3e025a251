"""`foreword chat` as a user has it: on a terminal, and through a pipe."""

import re
import subprocess
from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.cli.chat.text import visible
from foreword.models.sources.builtin import cache_directory
from helpers.command_line import assert_one_line_error, foreword, refusal
from helpers.terminal import CTRL_C, CTRL_D, Terminal
from helpers.tiny_models import make_hf_model

GUESSED, OWN = "\x1b[38;5;33m", "\x1b[38;5;208m"
PROMPT = "> "
OPTIONS = ["--temperature", "0", "--dtype", "float32"]
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can talk for a long time."""
    return make_hf_model(tmp_path_factory.mktemp("long"), max_position_embeddings=65536, eos_token_id=0)


def piped(model: Path, lines: str, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    return foreword("chat", "--model", str(model), *OPTIONS, *more, stdin=lines, env=env)


def test_lines_through_a_pipe_are_answered_in_turn(tiny_model: Path):
    run = piped(tiny_model, "the sky\n\n/plain\nthe sea\n/stats\n/quit\nnever read\n", "--max-tokens", "24")
    assert run.returncode == 0, run.stderr
    llm = LLM(str(tiny_model), dtype="float32")
    messages, expected = [], ""
    for question in ("the sky", "the sea"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        expected += visible(answer) + "\n"
    assert run.stdout == expected
    notes = run.stderr
    for word in ("plain decoding", "tokens per pass", "session (2)"):
        assert word in notes
    assert "tokens sampled by the target" not in notes, "a pipe has no colours to explain"
    assert "\x1b" not in run.stderr


def test_run_takes_the_model_first_and_chats_or_answers_once(tiny_model: Path):
    chatted = piped(tiny_model, "the sky\n", "--max-tokens", "12")
    settings = [*OPTIONS, "--max-tokens", "12"]
    run = foreword("run", str(tiny_model), *settings, stdin="the sky\n")
    once = foreword("run", str(tiny_model), "the sky", *settings, stdin="")
    assert run.returncode == once.returncode == 0, run.stderr + once.stderr
    assert run.stdout == once.stdout == chatted.stdout != ""


@pytest.mark.model
def test_the_default_model_is_talked_to_with_its_own_head(tmp_path: Path):
    """The head keeps rows in the KV pages: they are laid out for it at the start, or when it is asked for."""
    (tmp_path / "models").symlink_to(cache_directory() / "models")  # without what others' requests have shown
    environment = {"FOREWORD_CACHE": str(tmp_path)}
    head = '{"method": "eagle3", "model": "smollm2-135m-eagle3", "fixed": true}'
    question = "Name three colours.\n"
    texts = []
    for start, lines in ((head, question), ("off", f"/method {head}\n{question}")):
        options = ["--max-tokens", "12", "--temperature", "0", "--speculation", start]
        run = foreword("chat", *options, stdin=lines, env=environment)
        assert run.returncode == 0, run.stderr
        assert re.search(r"[1-9]\d* of \d+ draft tokens accepted", run.stderr), run.stderr
        texts.append(run.stdout)
    assert texts[0] == texts[1] != ""


def test_bytes_that_are_no_text_and_bad_commands_do_not_end_it(tiny_model: Path):
    run = piped(tiny_model, "\udcff\udcfe the sky\n/nonsense\n/depth many\nthe sea", "--max-tokens", "4")
    assert run.returncode == 0, run.stderr
    notes = run.stderr
    assert "unknown command /nonsense" in notes
    assert "/depth takes a whole number" in notes
    assert notes.count("tokens/s") == 2


def test_colours_tell_guesses_from_own_tokens_and_no_color_is_heard(tiny_model: Path):
    options = ["--max-tokens", "150", "--speculative-config", NGRAM]
    line = "the the the the the the\n"
    coloured = piped(tiny_model, line, *options, FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert GUESSED in coloured
    assert OWN in coloured
    plain = piped(tiny_model, line, *options, NO_COLOR="1", FORCE_COLOR="1").stdout
    assert "\x1b[38" not in plain
    bare = re.compile(r"\x1b\[[0-9;]*m")
    assert bare.sub("", coloured) == bare.sub("", plain)


def test_what_cannot_be_is_refused_before_the_chat_begins(tiny_model: Path):
    chat = ["chat", "--model", str(tiny_model)]
    assert_one_line_error(refusal(*chat, "--speculative-config", '{"method": "oracle"}'), "oracle")
    assert_one_line_error(refusal(*chat, "--temperature", "-1"), "temperature")


def prompt_tokens(screen: str) -> int:
    found = re.search(r"\d+ of (\d+) prompt tokens cached", screen)
    assert found is not None, screen
    return int(found[1])


def test_ctrl_c_stops_the_answer_and_not_the_program(long_model: Path):
    options = ["--model", str(long_model), "--max-tokens", "60000", *OPTIONS]
    with Terminal("chat", *options) as terminal:
        terminal.wait_for("tokens sampled by the target")
        terminal.wait_for(PROMPT)
        terminal.send("the sky\r")
        terminal.wait_for(OWN)  # the answer has begun
        terminal.send(CTRL_C)
        first = terminal.wait_for("prompt tokens cached")
        assert "stopped: " in first
        terminal.wait_for(PROMPT)
        terminal.send("/stats\r")
        terminal.wait_for("session (1)")
        terminal.wait_for(PROMPT)
        terminal.press_until(CTRL_C, "/exit or Ctrl-D leaves")
        terminal.wait_for(PROMPT)
        terminal.press_until("half a line" + CTRL_C, "/exit or Ctrl-D leaves")
        terminal.wait_for(PROMPT)
        terminal.send("\x1b[A\x1b[A\r")  # two lines up in the history: the question again
        terminal.wait_for(OWN)
        terminal.send(CTRL_C)
        again = terminal.wait_for("prompt tokens cached")
        assert "stopped: " in again
        assert prompt_tokens(again) > prompt_tokens(first)  # what was said before Ctrl-C is still there
        terminal.wait_for(PROMPT)
        terminal.send(CTRL_D)
        assert terminal.wait_for_end() == 0
