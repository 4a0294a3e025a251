from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import DrafterKind, drafter_kinds
from foreword.errors import RequestError


def test_one_json_object_as_users_of_vllm_know_it():
    config = SpeculationConfig.parse(
        '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3}'
    )
    assert config.method == ("ngram",)
    assert config.num_speculative_tokens == 7
    assert config.options == (("prompt_lookup_max", 3),)


def test_several_drafters_may_be_joined_by_a_plus():
    assert SpeculationConfig.parse({"method": "suffix + ngram"}).method == ("suffix", "ngram")
    with pytest.raises(RequestError, match="no method 'magic'"):
        SpeculationConfig.parse({"method": "ngram+magic"})


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("{", "JSON"),
        ("[1]", "object"),
        ({}, "method"),
        ({"method": "magic"}, "magic"),
        ({"method": []}, "method"),
        ({"method": ["ngram", "ngram"]}, "method"),
        ({"method": 3}, "method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "num_speculative_tokens"),
        ({"method": "ngram", "max_depth": 0}, "max_depth"),
        ({"method": "ngram", "combine": "average"}, "combine"),
        ({"method": "ngram", "draft_timeout": 0}, "draft_timeout"),
        ({"method": "ngram", "tree_width": 2}, "tree_width"),
        ({"method": "ngram", "promt_lookup_max": 2}, "prompt_lookup_max"),
    ],
)
def test_bad_settings_are_refused_by_name(given, word: str):
    with pytest.raises(RequestError, match=word):
        SpeculationConfig.parse(given)


@pytest.mark.parametrize(
    ("method", "values", "word"),
    [
        ("ngram", {"prompt_lookup_max": "3"}, "prompt_lookup_max"),
        ("ngram", {"prompt_lookup_max": True}, "prompt_lookup_max"),
        ("draft_model", {}, "model"),
        ("draft_model", {"model": 5}, "model"),
        ("self_quantized", {"bits": 5}, "bits"),
        (
            "layer_skip",
            {"layers": "0-3"},
            r"a list of the layers that run, such as \[0, 1, 2, 3\], not '0-3'",
        ),
        ("layer_skip", {"layers": []}, "a list of the layers"),
        ("layer_skip", {"layers": [0, "1"]}, "a list of the layers"),
        ("layer_skip", {"layers": [0, 1], "exit_layer": 2}, "exclude each other"),
        ("layer_skip", {"exit_layer": -1}, "exit_layer must be 0 or more"),
        ("lookahead", {"pool_from_prompt": 1}, "true or false"),
    ],
)
def test_a_drafters_own_settings_are_checked(method: str, values: dict, word: str):
    with pytest.raises(RequestError, match=word):
        drafter_kinds()[method].configure(values)


class _Entry:
    value = "somewhere:thing"

    def __init__(self, name: str, thing: object) -> None:
        self.name, self._thing = name, thing

    def load(self) -> object:
        return self._thing


@pytest.fixture
def _kinds_anew() -> Iterator[None]:
    drafter_kinds.cache_clear()
    yield
    drafter_kinds.cache_clear()


@pytest.mark.usefixtures("_kinds_anew")
def test_another_package_may_add_a_drafter_but_not_replace_ours(monkeypatch: pytest.MonkeyPatch):
    from foreword.drafters import registry
    from foreword.drafters.lookup.ngram import NgramConfig, NgramDrafter

    theirs = DrafterKind("theirs", NgramConfig, lambda settings, _: NgramDrafter(settings))
    entries = [_Entry("theirs", theirs), _Entry("ngram", theirs)]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    kinds = drafter_kinds()
    assert kinds["theirs"] is theirs
    assert kinds["ngram"] is not theirs
    assert SpeculationConfig.parse({"method": "theirs", "prompt_lookup_max": 3}).method == ("theirs",)


class _Unloadable(_Entry):
    def load(self) -> object:
        raise ImportError("no module named\nmissing")


@pytest.mark.usefixtures("_kinds_anew")
@pytest.mark.parametrize("entry", [_Entry("bad", object()), _Unloadable("bad", None)])
def test_a_broken_plug_in_is_refused_by_name_and_bothers_nobody_else(
    monkeypatch: pytest.MonkeyPatch, entry: _Entry
):
    from foreword.drafters import registry

    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    assert SpeculationConfig.parse({"method": "ngram"}).method == ("ngram",)
    with pytest.raises(RequestError, match="bad") as caught:
        SpeculationConfig.parse({"method": "bad"})
    assert "\n" not in str(caught.value)


def test_what_a_setting_does_not_name_stays_as_the_base_has_it():
    base = SpeculationConfig.parse({"method": "ngram", "prompt_lookup_max": 7, "num_speculative_tokens": 3})
    for given in ({"num_speculative_tokens": 9}, {"method": "ngram", "num_speculative_tokens": 9}):
        changed = SpeculationConfig.parse(given, base)
        assert dict(changed.options) == {"prompt_lookup_max": 7}
        assert changed.num_speculative_tokens == 9
    assert SpeculationConfig.parse({"method": "suffix"}, base).options == ()
    several = SpeculationConfig.parse(
        {
            "method": ["ngram", "suffix"],
            "combine": "route",
            "prompt_lookup_max": 7,
            "num_speculative_tokens": 3,
        }
    )
    alone = SpeculationConfig.parse({"method": "ngram"}, several)
    assert dict(alone.options) == {"prompt_lookup_max": 7}
    assert (alone.combine, alone.num_speculative_tokens) == ("first", 5)
    assert SpeculationConfig.parse({"method": "suffix"}, several).options == ()
    with pytest.raises(RequestError, match="give a method"):
        SpeculationConfig.parse({"num_speculative_tokens": 9})


@pytest.mark.parametrize("size", [1, 0, True, "2", 2.5])
def test_a_batch_size_to_stop_at_is_checked(size: object):
    with pytest.raises(RequestError, match="disable_by_batch_size"):
        SpeculationConfig.parse({"method": "ngram", "disable_by_batch_size": size})


@pytest.mark.parametrize(
    "given",
    [
        {"method": "suffix"},
        {"method": "lookahead"},
        {"method": "layer_skip", "tree_width": 3},
        {"method": ["suffix", "layer_skip"]},
        {"method": ["suffix", "layer_skip"], "combine": "merge"},
    ],
)
def test_trees_of_ours_are_fixed_before_anything_is_drawn(given: dict):
    config = SpeculationConfig.parse(given)
    assert config.makes_trees
    assert config.fixes_trees


@pytest.mark.usefixtures("_kinds_anew")
@pytest.mark.parametrize("branches", [False, True])
def test_a_plug_in_that_does_not_say_how_it_draws_is_taken_to_rank(
    monkeypatch: pytest.MonkeyPatch, branches: bool
):
    @dataclass(frozen=True)
    class Nothing:
        pass

    kind = DrafterKind("test", Nothing, lambda *_: None, lambda _: branches)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr("foreword.drafters.registry.entry_points", lambda group: [_Entry("ours", kind)])
    config = SpeculationConfig.parse({"method": ["ours", "suffix"]})
    assert config.makes_trees
    assert config.fixes_trees == (not branches)
