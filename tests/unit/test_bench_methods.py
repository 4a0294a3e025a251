"""Methods are named on the command line."""

import pytest

from foreword.bench.drafters.methods import default_methods, parse_methods
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
