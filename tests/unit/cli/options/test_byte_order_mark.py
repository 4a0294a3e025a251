"""Editors on Windows begin UTF-8 files with a byte order mark; it is no part of the text."""

import io
import json
from pathlib import Path

import pytest

from foreword.bench.prompts import read_prompts as read_dataset
from foreword.bench.quality import read_text as read_bench_text
from foreword.cli.options.common import read_text
from foreword.control.policy_file.parsing import read_policy
from foreword.train.texts.prompts import read_prompt_file

MARK = b"\xef\xbb\xbf"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(MARK + json.dumps({"prompt": "Why?"}).encode() + b"\n")
    return file


def test_prompts_and_texts_are_read(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert len(read_prompt_file(prompts)) == 1
    assert len(read_dataset(prompts)) == 1
    plain = tmp_path / "prompt.txt"
    plain.write_bytes(MARK + b"Why?")
    assert read_text(plain) == read_bench_text(plain) == "Why?"
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffWhy?"))
    assert read_text(Path("-")) == "Why?"


def test_policy_files_are_read(tmp_path: Path):
    file = tmp_path / "policy.json"
    file.write_bytes(MARK + b'{"version": 1, "drafters": {"ngram": {"method": "ngram"}}, "cohorts": []}')
    assert set(read_policy(file).drafters) == {"ngram"}
