"""Prompts files: three forms, and one line for what is none of them."""

import json
from pathlib import Path

import pytest

from foreword.errors import RequestError
from foreword.train.texts.prompts import FilePrompt, read_prompt_file


def _write(path: Path, *values: object) -> Path:
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n\n", encoding="utf-8")
    return path


def test_plain_prompts_chat_turns_and_sharegpt(tmp_path: Path):
    path = _write(
        tmp_path / "mine.jsonl",
        {"prompt": "Hello."},
        {"turns": ["One?", "Two?"], "category": "math"},
        {"messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": "not used"},
            {"role": "user", "content": "B"},
        ]},
        {"conversations": [
            {"from": "human", "value": "X"}, {"from": "gpt", "value": "not used"}, {"from": "human", "value": "Y"},
        ]},
    )  # fmt: skip
    assert read_prompt_file(path) == [
        FilePrompt("mine", ("Hello.",)),
        FilePrompt("math", ("One?", "Two?")),
        FilePrompt("mine", ("A", "B"), "Be brief."),
        FilePrompt("mine", ("X", "Y")),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": ""}', "a message is empty"),
        ('{"prompt": 7}', "a message is 7, not a text"),
        ('{"messages": [{"role": "user"}]}', "a message is null, not a text"),
        ('{"messages": [["user", "x"]]}', "messages is not a list of objects"),
        ('{"conversations": 3}', "conversations is not a list of objects"),
        ('{"text": "x"}', "none of the keys prompt"),
        ('{"messages": []}', "no user message"),
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
        ("[" * 100_000, "JSON that is too deep"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, reason: str, tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(RequestError, match=f"line 2.*{reason}"):
        read_prompt_file(path)


def test_an_empty_or_missing_file_is_told(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n \n", encoding="utf-8")
    with pytest.raises(RequestError, match="has no prompts"):
        read_prompt_file(tmp_path / "empty.jsonl")
    with pytest.raises(RequestError, match="cannot be read"):
        read_prompt_file(tmp_path / "missing.jsonl")
