"""A run can be interrupted anywhere and goes on where it was."""

from pathlib import Path

import pytest

from foreword.bench.drafters.decode import Record
from foreword.bench.ledger import Ledger
from foreword.errors import RequestError
from helpers.bench_runs import record

SETTINGS = {"model": "m", "max_tokens": 64}


def test_what_was_added_is_there_again(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    ledger = Ledger(path, SETTINGS, Record)
    assert ledger.records == []
    for found in (record("a", "1"), record("b", "1", memory_bytes=7)):
        ledger.add(found)
    assert Ledger(path, SETTINGS, Record).records == [record("a", "1"), record("b", "1", memory_bytes=7)]


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_line_that_was_cut_short_is_measured_again(tmp_path: Path, cut: int):
    path = tmp_path / "runs.jsonl"
    ledger = Ledger(path, SETTINGS, Record)
    ledger.add(record("a", "1"))
    ledger.add(record("a", "2"))
    path.write_bytes(path.read_bytes()[:-cut])
    resumed = Ledger(path, SETTINGS, Record)
    assert resumed.records == [record("a", "1")]
    resumed.add(record("a", "2"))
    assert Ledger(path, SETTINGS, Record).records == [record("a", "1"), record("a", "2")]


def test_a_file_of_other_settings_is_refused(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    Ledger(path, SETTINGS, Record).add(record("a", "1"))
    before = path.read_bytes()
    with pytest.raises(RequestError, match="max_tokens 64, not 32"):
        Ledger(path, SETTINGS | {"max_tokens": 32}, Record)
    with pytest.raises(RequestError, match="seed None, not 1"):
        Ledger(path, SETTINGS | {"seed": 1}, Record)
    assert path.read_bytes() == before


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_settings_that_were_cut_short_are_written_again(tmp_path: Path, cut: int):
    path = tmp_path / "runs.jsonl"
    Ledger(path, SETTINGS, Record)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert Ledger(path, SETTINGS, Record).records == []
    assert path.read_bytes() == whole


FOREIGN = ["hello\n", "[1]\n", '{"settings": 3}\n', "{}\n"]


@pytest.mark.parametrize("content", [*FOREIGN, "hello", '{"model": "m"}', "first\nlast, without an end"])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: str):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(RequestError, match="not a file of this benchmark"):
        Ledger(path, SETTINGS, Record)
    assert path.read_text() == content


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    Ledger(path, SETTINGS, Record).add(record("a", "1"))
    with path.open("a") as file:
        file.write('{"drafter": "a"}\n')
    with pytest.raises(RequestError, match="line 3"):
        Ledger(path, SETTINGS, Record)


def test_a_place_that_cannot_be_written_is_an_error_of_the_user(tmp_path: Path):
    with pytest.raises(RequestError, match="cannot be written"):
        Ledger(tmp_path / "no" / "such" / "folder.jsonl", SETTINGS, Record)
    with pytest.raises(RequestError, match="cannot be used"):
        Ledger(tmp_path, SETTINGS, Record)
