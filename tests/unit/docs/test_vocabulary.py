"""The check of words finds old ones in sentences, and leaves code alone."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def vocabulary():
    spec = importlib.util.spec_from_file_location("vocabulary", ROOT / "scripts" / "vocabulary.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.md", "Whoever guesses.\nIt runs behind a proxy.\n", [1, 1]),
        ("a.md", "`guesses` stays.\n```\nnobody\n```\nA row behind another.\n", [5]),
        ("a.py", 'guesses = told(1)  # in vain\n"""Nobody\nis told."""\n', [1, 2, 3]),
        ("a.py", 'x = f"{told} or not"\ny = "told"\n', [2]),
    ],
)
def test_words_are_found_where_people_read_them(vocabulary, tmp_path, monkeypatch, name, text, lines):
    monkeypatch.setattr(vocabulary, "ROOT", tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert [int(line.split(":")[1]) for line in vocabulary.findings(tmp_path / name)] == lines
