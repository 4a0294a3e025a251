"""Run the command as a user does: in a process of its own."""

import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from unittest.mock import patch

import pytest

from foreword.cli import console
from foreword.cli.main import main
from helpers.warm_process import warm

TIMEOUT = 300


def foreword(
    *arguments: str, env: dict[str, str] | None = None, stdin: str | None = None, timeout: float = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """In a process that is forked from a warm one, or in a fresh one if that has another environment."""
    if warm.fits(env):
        return warm.run(arguments, stdin, timeout, env)
    command = [sys.executable, "-m", "foreword", *arguments]
    environment = {**os.environ, **(env or {})}
    given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(
        command, **given, capture_output=True, text=True, env=environment, check=False, timeout=timeout
    )


def refusal(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As `foreword`, in this process: for a command that ends before it has done or loaded anything."""
    out, err = StringIO(), StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["foreword", *arguments]),
        patch.object(console, "after_loading", console.after_loading),
        patch.object(console.stdout, "stderr", False),
        pytest.raises(SystemExit) as end,
    ):
        main()
    return subprocess.CompletedProcess(sys.argv, int(end.value.code or 0), out.getvalue(), err.getvalue())


def assert_one_line_error(run: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    assert run.returncode == code, run
    assert run.stdout == ""
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("foreword: ")
    for word in words:
        assert word in lines[0]
