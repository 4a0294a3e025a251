"""Methods are named on the command line."""

import json
from pathlib import Path

import pytest

from foreword.bench.methods import default_methods, parse_methods
from foreword.errors import RequestError


def test_names_objects_and_combinations():
    settings = '{"method": "suffix", "num_speculative_tokens": 8} ', '{"method":"ngram","max_depth":3}'
    methods = parse_methods(f"ngram, {settings[0]},ngram+suffix,{settings[1]}")
    assert [method.label for method in methods] == [
        "ngram",
        "suffix num_speculative_tokens=8",
        "ngram+suffix",
        "ngram max_depth=3",
    ]
    assert methods[2].config == {"method": ["ngram", "suffix"]}


def test_of_a_model_that_is_a_path_the_label_shows_the_last_part(tmp_path: Path):
    (tmp_path / "small.gguf").touch()
    forms = [
        {"method": "draft_model", "model": model} for model in (str(tmp_path / "small.gguf"), "org/name")
    ]
    methods = parse_methods(",".join(map(json.dumps, forms)))
    assert [method.label for method in methods] == [
        "draft_model model=small.gguf",
        "draft_model model=org/name",
    ]
    assert [method.config for method in methods] == forms


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "at least one"),
        ("ngram,ngram", "once"),
        ("oracle", "oracle"),
        ('{"method": "ngram"', "JSON"),
        ('{"method": "ngram"} suffix', "comma"),
        ('{"method": "ngram", "k": 3}', "'k'"),
    ],
)
def test_bad_methods_are_refused(text: str, word: str):
    with pytest.raises(RequestError, match=word):
        parse_methods(text)


def test_by_default_everything_that_needs_no_settings():
    labels = [method.label for method in default_methods()]
    assert {"ngram", "suffix"} <= set(labels)


def test_default_is_what_the_engine_does_by_itself():
    first, second = parse_methods("default,ngram")
    assert (first.label, first.config) == ("default", None)
    assert second.config == {"method": "ngram"}
