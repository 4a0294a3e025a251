"""Commands that are forked from a warm process are as those that are started by themselves."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from helpers.warm_process import own_environment, warm


def alone(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    command = [sys.executable, "-m", "foreword", *arguments]
    return subprocess.run(command, **given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        (("generate", "{model}", "--max-tokens", "4", "--temperature", "0", "--raw"), "from the pipe"),
        (("generate", "hi", "--max-tokens", "x"), None),
    ],
)
def test_the_same_streams_and_exit_code(tiny_model: Path, arguments: tuple[str, ...], stdin: str | None):
    given = tuple(one.replace("{model}", f"--model={tiny_model}") for one in arguments)
    forked, fresh = warm.run(given, stdin, 60), alone(*given, stdin=stdin)
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    assert bool(forked.stderr) == bool(fresh.stderr)


def test_variables_that_modules_have_read_want_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    warm.run(("--version",), None, 60)
    # Libraries that earlier tests have imported may have set variables since it was started.
    monkeypatch.setattr(warm, "_environment", own_environment())
    assert warm.fits()
    import_module("torch._dynamo")  # sets a variable: many tests import it after the process has started
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ and warm.fits()
    assert warm.fits({"FOREWORD_CACHE": "elsewhere"})
    assert not warm.fits({"TRITON_INTERPRET": "7"})
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "7")
    with pytest.warns(UserWarning, match="OMP_NUM_THREADS"):
        assert not warm.fits()


def test_a_command_has_the_environment_of_its_caller(tmp_path: Path):
    found = warm.run(("models",), None, 60, {"FOREWORD_CACHE": str(tmp_path / "elsewhere")})
    assert str(tmp_path / "elsewhere") in found.stdout
    assert str(tmp_path) not in warm.run(("models",), None, 60).stdout


def test_a_command_starts_where_its_caller_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.jsonl").write_text('{"question": \n')
    run = warm.run(("bench", "drafters", "--dataset", "few.jsonl"), None, 60)
    assert (run.returncode, "line 1" in run.stderr) == (2, True), run


@pytest.mark.parametrize("has_called_cuda", [False, True])
def test_what_a_command_starts_is_forked_unless_cuda_would_refuse(has_called_cuda: bool):
    program = """
import os, subprocess, sys, torch
torch.cuda._is_in_bad_fork = lambda: sys.argv[1] == "True"
environment = {**os.environ, "PYTHONWARNINGS": "unknown"}  # of which a new interpreter complains
command = [sys.executable, "-m", "foreword", "--version"]
run = subprocess.run(command, env=environment, capture_output=True, text=True)
print(run.stdout.split()[0], "Invalid -W option" in run.stderr)
"""
    run = warm.run([str(has_called_cuda)], None, 60, program=program)
    assert run.stdout.split() == ["foreword", str(has_called_cuda)], run
