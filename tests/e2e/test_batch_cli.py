"""`foreword batch` as a user runs it."""

import json
import os
import signal
import time
from pathlib import Path

from helpers.command_line import TIMEOUT, assert_one_line_error, foreword
from helpers.warm_process import warm

IN_BACKGROUND = """
import signal

from foreword.cli.main import main

signal.signal(signal.SIGINT, signal.SIG_IGN)
main()
"""
"""The command as a script starts it in the background, where SIGINT is ignored."""


def test_a_file_is_answered_and_continued(tiny_model: Path, tmp_path: Path):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "seed": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(json.dumps(line) + "\n{\n", encoding="utf-8")
    options = [str(requests), str(answers), "--model", str(tiny_model)]
    run = foreword("batch", *options)
    assert run.returncode == 0, run.stderr
    assert f"1 answered, 1 failed, 0 kept from before: {answers}" in run.stderr
    refused, answered = map(json.loads, answers.read_text("utf-8").splitlines())
    assert refused["error"]["message"] == "line 2: is not JSON"
    assert answered["response"]["body"]["usage"]["completion_tokens"] <= 4
    requests.write_text(
        json.dumps(line) + "\n" + json.dumps(line | {"custom_id": "b"}) + "\n", encoding="utf-8"
    )
    again = foreword("batch", *options)
    assert f"1 answered, 0 failed, 1 kept from before: {answers}" in again.stderr
    assert len(answers.read_text("utf-8").splitlines()) == 2
    assert_one_line_error(foreword("batch", str(tmp_path / "missing"), str(answers)), "cannot be read")


def test_a_run_that_was_terminated_continues(tiny_model: Path, tmp_path: Path):
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(40)
    ]
    requests.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    options = ["batch", str(requests), str(answers), "--model", str(tiny_model), "--max-num-seqs", "1"]
    with Path(os.devnull).open("r+") as nothing, (tmp_path / "errors").open("w") as file:
        run = warm.start(options, [nothing.fileno(), nothing.fileno(), file.fileno()], program=IN_BACKGROUND)
    while run.poll() is None and not (answers.exists() and answers.stat().st_size):
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    run.wait(TIMEOUT)
    errors = (tmp_path / "errors").read_text("utf-8")
    assert run.returncode == 128 + signal.SIGTERM, errors
    assert errors.strip().endswith("of 40 answered; the same command continues")
    assert "Traceback" not in errors
    kept = len(answers.read_text("utf-8").splitlines())
    assert 0 < kept < 40
    again = foreword(*options[:-2])
    assert f"{40 - kept} answered, 0 failed, {kept} kept from before: {answers}" in again.stderr
