"""Which drafter a request gets."""

from typing import Any

import pytest

from foreword.acceptance.rules.rule import Rule
from foreword.drafters.config import SpeculationConfig
from foreword.engine.drafter_pool import MOST_DRAFTERS, DrafterRack
from foreword.errors import RequestError


class Named:
    """A drafter that only knows what it was made from."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config

    def propose(self, asks: Any) -> list[Any]:
        return []

    def forget(self, request: Any) -> None:
        """Nothing is kept."""


def rack(default: dict[str, Any] | None = None, rule: Rule = Rule.COUPLED) -> DrafterRack:
    return DrafterRack(Named, rule, None if default is None else SpeculationConfig.parse(default))


def test_a_request_that_does_not_say_gets_the_default():
    with_default = rack({"method": "ngram", "num_speculative_tokens": 4})
    for setting in (None, True):
        found = with_default.resolve(setting)
        assert found is not None
        assert (found.method, found.max_nodes, found.max_depth) == ("ngram", 4, 4)
    assert with_default.resolve(False) is None
    assert rack().resolve(None) is None


def test_a_depth_alone_changes_the_default_and_shares_its_drafter():
    with_default = rack({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5})
    deep = with_default.resolve({"num_speculative_tokens": 9, "max_depth": 3})
    assert deep is not None
    assert (deep.max_nodes, deep.max_depth) == (9, 3)
    assert with_default.default is not None
    assert deep.drafter is with_default.default.drafter


def test_drafters_are_shared_by_equal_settings_only():
    shelf = rack()
    first = shelf.resolve({"method": "ngram"})
    again = shelf.resolve({"method": "ngram", "num_speculative_tokens": 9})
    other = shelf.resolve({"method": "ngram", "prompt_lookup_max": 7})
    assert first is not None
    assert again is not None
    assert other is not None
    assert first.drafter is again.drafter
    assert first.drafter is not other.drafter


def test_no_number_of_wishes_keeps_more_than_so_many_drafters():
    shelf = rack()
    for most in range(1, 3 * MOST_DRAFTERS):
        shelf.resolve({"method": "ngram", "prompt_lookup_max": 2 + most})
    assert len(shelf._drafters) == MOST_DRAFTERS


def test_a_default_that_is_replaced_is_let_go():
    shelf = rack({"method": "ngram"})
    shelf.set_default(SpeculationConfig.parse({"method": "suffix"}))
    assert len(shelf._drafters) == 1
    shelf.set_default(None)
    assert (shelf.default, len(shelf._drafters)) == (None, 0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"method": "telepathy"}, "telepathy"),
        ({"num_speculative_tokens": 3}, "give a method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "1 .. 64"),
        ("ngram", "true, false or an object"),
    ],
)
def test_bad_wishes_are_refused_in_one_line(setting: Any, message: str):
    with pytest.raises(RequestError, match=message) as caught:
        rack().resolve(setting)
    assert "\n" not in str(caught.value)


def test_a_tree_is_refused_under_a_rule_for_chains():
    with pytest.raises(RequestError, match="chains only"):
        rack(rule=Rule.TOKEN).resolve({"method": "suffix"})


def test_naming_the_default_method_keeps_what_the_default_was_given():
    given = {"method": "layer_skip", "layers": [0, 2], "draft_timeout": 5.0}
    shelf = rack(given)
    named = shelf.resolve({"method": "layer_skip", "num_speculative_tokens": 2})
    assert named is not None
    assert shelf.default is not None
    assert (named.drafter is shelf.default.drafter, named.max_nodes) == (True, 2)


def test_the_default_is_never_let_go_for_others():
    shelf = rack({"method": "suffix"})
    for most in range(1, 3 * MOST_DRAFTERS):
        shelf.resolve({"method": "ngram", "prompt_lookup_max": 2 + most})
    again = shelf.resolve({"method": "suffix", "num_speculative_tokens": 2})
    assert again is not None
    assert shelf.default is not None
    assert again.drafter is shelf.default.drafter
