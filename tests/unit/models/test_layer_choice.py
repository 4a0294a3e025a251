"""Which layers a user means."""

from itertools import pairwise
from pathlib import Path

import pytest

from foreword.errors import RequestError
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.pruning import check_layers_of, parse_layers, spread_layers


@pytest.fixture
def thirty(tiny_model: Path) -> ModelConfig:
    return open_checkpoint(tiny_model).config.with_layers([0] * 30)


def test_numbers_and_ranges():
    assert parse_layers("3") == [3]
    assert parse_layers("0-2, 7 ,28-29") == [0, 1, 2, 7, 28, 29]


@pytest.mark.parametrize("text", ["", "a", "3-", "-3", "5-2", "1,,2", "1.5", "0-9999999", "٣"])
def test_other_texts_are_refused_by_the_part_that_is_wrong(text: str):
    with pytest.raises(RequestError, match="0-9,20-29"):
        parse_layers(text)


@pytest.mark.parametrize("count", range(1, 31))
def test_spread_layers_are_even_and_keep_both_ends(thirty: ModelConfig, count: int):
    layers = spread_layers(thirty, count)
    check_layers_of(thirty, layers)
    assert len(layers) == count
    assert layers[0] == 0
    assert count == 1 or layers[-1] == 29
    gaps = {later - earlier for earlier, later in pairwise(layers)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("count", [-1, 0, 31])
def test_too_many_or_too_few_are_refused(thirty: ModelConfig, count: int):
    with pytest.raises(RequestError, match="from 1 to 30"):
        spread_layers(thirty, count)


@pytest.mark.parametrize(
    ("layers", "words"), [([], "one layer"), ([3, 30], "layer 30"), ([1, 1], "once"), ([2, 1], "ascending")]
)
def test_layers_that_cannot_be_kept_are_refused(thirty: ModelConfig, layers: list[int], words: str):
    with pytest.raises(RequestError, match=words):
        check_layers_of(thirty, layers)
