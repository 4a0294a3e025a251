"""`foreword batch` as a user runs it."""

import json
from pathlib import Path

from helpers.command_line import assert_one_line_error, foreword


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
