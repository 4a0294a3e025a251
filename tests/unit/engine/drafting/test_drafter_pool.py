"""Which drafter a request gets."""

from typing import Any

import pytest

from foreword.acceptance.rules.rule import Rule
from foreword.backends.batch import Tap
from foreword.drafters.combined import FallbackDrafter
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.lookup.grammar import GrammarDrafter
from foreword.engine.drafting.drafter_pool import MAX_DRAFTERS, DrafterPool
from foreword.engine.drafting.known_answers import HINTED_DRAFT_TOKENS, AnswerHints
from foreword.engine.requests.request import Request
from foreword.errors import RequestError
from foreword.kv.spec import RowSpec
from foreword.speculation.drafting import Drafter, DrafterNeeds, Traits
from foreword.speculation.requests import DraftPlan
from helpers.requests import lone_request

PREDICTED = AnswerHints(prediction=True)


class Named(Drafter):
    """A drafter that only knows what it was made from."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config
        self.forgotten: list[int] = []
        self.is_closed = False

    def propose(self, asks: Any) -> list[Any]:
        return []

    def forget(self, request: Any) -> None:
        self.forgotten.append(request.request_id)

    def close(self) -> None:
        self.is_closed = True


def pool(default: dict[str, Any] | None = None, rule: Rule = Rule.COUPLED) -> DrafterPool:
    return DrafterPool(Named, rule, None if default is None else SpeculationConfig.parse(default))


def test_a_request_that_does_not_say_gets_the_default():
    with_default = pool({"method": "ngram", "num_speculative_tokens": 4})
    for setting in (None, True):
        found = with_default.resolve(setting)
        assert found is not None
        assert (found.method, found.max_nodes, found.max_depth) == ("ngram", 4, 4)
    assert with_default.resolve(False) is None
    assert pool().resolve(None) is None


def test_a_depth_alone_changes_the_default_and_shares_its_drafter():
    with_default = pool({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5})
    deep = with_default.resolve({"num_speculative_tokens": 9, "max_depth": 3})
    assert deep is not None
    assert (deep.max_nodes, deep.max_depth) == (9, 3)
    assert with_default.default is not None
    assert deep.drafter is with_default.default.drafter


def test_drafters_are_shared_by_equal_settings_only():
    drafters = pool()
    first = drafters.resolve({"method": "ngram"})
    again = drafters.resolve({"method": "ngram", "num_speculative_tokens": 9})
    other = drafters.resolve({"method": "ngram", "prompt_lookup_max": 7})
    assert drafters.resolve("ngram") == first is not None
    assert again is not None
    assert other is not None
    assert first.drafter is again.drafter
    assert first.drafter is not other.drafter


def test_no_number_of_settings_keeps_more_than_a_few_drafters():
    drafters = pool()
    for most in range(1, 3 * MAX_DRAFTERS):
        drafters.resolve({"method": "ngram", "prompt_lookup_max": 2 + most})
    assert len(drafters._drafters) == MAX_DRAFTERS


@pytest.mark.parametrize("count", [1, MAX_DRAFTERS + 2])
def test_kept_drafters_stay_whatever_else_is_requested(count: int):
    """Those of a policy file: releasing one would load it again within a request."""
    kept = [SpeculationConfig.parse({"method": "suffix", "min_match": 2 + n}) for n in range(count)]
    drafters = pool()
    for config in kept:
        drafters.keep(kept)
        drafters.create_early(config)
    for most in range(1, 3 * MAX_DRAFTERS):
        setting = {"method": "ngram", "prompt_lookup_max": 2 + most}
        assert drafters.resolve(setting) is not None
        assert drafters.is_ready(setting)
    assert all(drafters.created_by(config) for config in kept)
    assert len(drafters._drafters) == max(MAX_DRAFTERS, count + 1)
    drafters.keep([])
    drafters.resolve("jacobi")
    assert len(drafters._drafters) == MAX_DRAFTERS


def test_a_default_that_is_replaced_is_let_go():
    drafters = pool({"method": "ngram"})
    drafters.set_default(SpeculationConfig.parse({"method": "suffix"}))
    assert len(drafters._drafters) == 1
    drafters.set_default(None)
    assert (drafters.default, len(drafters._drafters)) == (None, 0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"method": "telepathy"}, "telepathy"),
        ({"num_speculative_tokens": 3}, "give a method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "1 .. 64"),
        ("magic", "no method"),
        (5, "a method's name, true, false or an object"),
    ],
)
def test_bad_settings_are_refused_in_one_line(setting: Any, message: str):
    with pytest.raises(RequestError, match=message) as caught:
        pool().resolve(setting)
    assert "\n" not in str(caught.value)


def test_a_tree_is_refused_under_a_rule_for_chains():
    with pytest.raises(RequestError, match="chains only"):
        pool(rule=Rule.TOKEN).resolve({"method": "suffix"})


def test_naming_the_default_method_keeps_what_the_default_was_given():
    given = {"method": "layer_skip", "layers": [0, 2], "draft_timeout": 5.0}
    drafters = pool(given)
    named = drafters.resolve({"method": "layer_skip", "num_speculative_tokens": 2})
    assert named is not None
    assert drafters.default is not None
    assert (named.drafter is drafters.default.drafter, named.max_nodes) == (True, 2)


def test_the_default_is_never_let_go_for_others():
    drafters = pool({"method": "suffix"})
    for most in range(1, 3 * MAX_DRAFTERS):
        drafters.resolve({"method": "ngram", "prompt_lookup_max": 2 + most})
    again = drafters.resolve({"method": "suffix", "num_speculative_tokens": 2})
    assert again is not None
    assert drafters.default is not None
    assert again.drafter is drafters.default.drafter


def user_of(plan: DraftPlan | None) -> Request:
    request = lone_request([1, 2])
    request.speculation = plan
    return request


def test_a_drafter_is_told_when_its_request_ends():
    drafters = pool({"method": "ngram"})
    request, other = (user_of(drafters.resolve(None)) for _ in range(2))
    for user in (request, other):
        drafters.hold(user)
    request.drafter_view.notified[0] = drafters.default.drafter
    drafters.end(request)
    drafters.end(other)  # it was never asked for this one
    assert drafters.default.drafter.forgotten == [request.request_id]


def test_a_drafter_that_is_let_go_is_closed_with_the_last_of_its_requests():
    drafters = pool({"method": "ngram"})
    old = drafters.default.drafter
    requests = [user_of(drafters.resolve(None)) for _ in range(2)]
    for request in requests:
        drafters.hold(request)
    drafters.set_default(None)
    assert not old.is_closed
    drafters.end(requests[0])
    assert not old.is_closed
    drafters.end(requests[1])
    assert old.is_closed


def test_a_drafter_that_is_let_go_between_its_choice_and_its_use_stays_open():
    drafters = pool()
    with drafters.keep_all_open():
        request = user_of(drafters.resolve({"method": "suffix"}))
        chosen: Any = request.speculation.drafter
        with drafters.keep_all_open():
            crowd_out(drafters)
        drafters.hold(request)
    assert not chosen.is_closed
    crowd_out(drafters)
    assert not chosen.is_closed
    drafters.release(request)
    assert chosen.is_closed


def test_a_drafter_that_is_let_go_between_its_choice_and_a_refusal_is_closed():
    drafters = pool()
    with drafters.keep_all_open():
        plan = drafters.resolve({"method": "suffix"})
        crowd_out(drafters)
        chosen: Any = plan.drafter
        assert not chosen.is_closed
    assert chosen.is_closed


def crowd_out(drafters: DrafterPool) -> None:
    """Request as many other drafters as are kept."""
    for most in range(MAX_DRAFTERS):
        drafters.resolve({"method": "ngram", "prompt_lookup_max": 2 + most})


def test_a_drafter_that_nobody_uses_is_closed_at_once():
    drafters = pool({"method": "ngram"})
    old = drafters.default.drafter
    drafters.set_default(SpeculationConfig.parse({"method": "suffix"}))
    assert old.is_closed


def test_closing_the_pool_closes_everyone_it_made_or_was_brought():
    brought = Named(SpeculationConfig.parse({"method": "ngram"}))
    drafters = DrafterPool(Named, Rule.COUPLED, SpeculationConfig.parse({"method": "suffix"}), [brought])
    made = drafters.default.drafter
    drafters.close()
    assert made.is_closed
    assert brought.is_closed


def test_a_drafter_whose_rows_the_pages_do_not_have_is_refused_by_name():
    class WithRows(Named):
        traits = Traits(needs=DrafterNeeds(rows=(RowSpec("head", 1, 1, 8),)))

        def observe(self, commits: Any) -> None:
            pass

    drafters = DrafterPool(WithRows, Rule.COUPLED)
    drafters.supplied_needs = DrafterNeeds()
    with pytest.raises(RequestError, match="ngram keeps rows of its own"):
        drafters.resolve({"method": "ngram"})
    drafters.supplied_needs = WithRows.traits.needs
    assert drafters.resolve({"method": "ngram"}) is not None


def test_what_is_at_hand_needs_no_making():
    drafters = pool({"method": "ngram"})
    assert drafters.is_ready(None)
    assert drafters.is_ready(False)
    assert drafters.is_ready({"num_speculative_tokens": 9})
    assert not drafters.is_ready({"method": "suffix"})
    drafters.resolve({"method": "suffix"})
    assert drafters.is_ready({"method": "suffix"})


def test_a_prediction_is_followed_first_and_the_same_drafter_stays_behind_it():
    drafters = pool({"method": "ngram", "num_speculative_tokens": 4, "disable_by_batch_size": 2})
    plan, again = (drafters.resolve(None, PREDICTED) for _ in range(2))
    assert plan is not None
    assert again is not None
    assert drafters.default is not None
    assert (plan.method, plan.max_nodes, plan.max_batch) == ("prediction+ngram", HINTED_DRAFT_TOKENS, None)
    assert plan.drafter is again.drafter
    assert isinstance(plan.drafter, FallbackDrafter)
    assert plan.drafter.parts[1] is drafters.default.drafter
    assert drafters.resolve(False, PREDICTED) is None
    asked = drafters.resolve({"method": "suffix", "num_speculative_tokens": 20}, PREDICTED)
    assert asked is not None
    assert (asked.method, asked.max_nodes) == ("prediction+suffix", 20)


def test_a_prediction_needs_no_default():
    drafters = pool()
    assert not drafters.is_ready(None, PREDICTED)
    plan = drafters.resolve(None, PREDICTED)
    assert plan is not None
    assert plan.method == "prediction"
    assert drafters.is_ready(None, PREDICTED)
    assert drafters.resolve({"method": "prediction"}, PREDICTED).drafter is plan.drafter
    assert DrafterPool(None, Rule.COUPLED).resolve(None, PREDICTED) is None
    with pytest.raises(RequestError, match="cannot make drafters"):
        DrafterPool(None, Rule.COUPLED).resolve({"method": "ngram"})


def test_a_drafter_behind_a_prediction_is_closed_after_its_last_request():
    drafters = pool({"method": "ngram"})
    assert drafters.default is not None
    behind: Any = drafters.default.drafter
    request = lone_request([1, 2])
    request.speculation = drafters.resolve(None, PREDICTED)
    drafters.hold(request)
    drafters.set_default(None)
    assert not behind.is_closed
    drafters.end(request)
    assert behind.is_closed
    fresh = drafters.resolve({"method": "ngram"}, PREDICTED)
    assert fresh is not None
    assert isinstance(fresh.drafter, FallbackDrafter)
    assert fresh.drafter.parts[1] is not behind


def test_a_drafter_that_wants_states_the_model_does_not_have_is_refused_by_name():
    class Tapped(Named):
        traits = Traits(needs=DrafterNeeds(taps=(Tap(99),)))

        def observe(self, commits: Any) -> None:
            pass

    with pytest.raises(RequestError, match="ngram does not fit this model"):
        DrafterPool(Tapped, Rule.COUPLED, num_layers=4).resolve({"method": "ngram"})


def test_what_is_at_hand_does_not_wait_for_another_that_is_being_made():
    drafters = pool({"method": "ngram"})
    with drafters._building:
        assert drafters.resolve({"num_speculative_tokens": 2}) is not None


def test_a_drafter_that_is_made_after_the_end_is_closed_at_once():
    drafters = pool()
    drafters.close()
    with pytest.raises(RequestError, match="closed"):
        drafters.resolve({"method": "ngram"})


def test_a_drafter_that_has_a_length_and_is_empty_is_made_once():
    class Empty(Named):
        def __len__(self) -> int:
            return 0

    drafters = DrafterPool(Empty, Rule.COUPLED)
    first, again = (drafters.resolve({"method": "ngram"}) for _ in range(2))
    assert first.drafter is again.drafter


def test_what_is_known_of_the_drafters_of_a_form_is_known_from_its_first_request_on():
    class Told(Named):
        def __init__(self, config: SpeculationConfig) -> None:
            super().__init__(config)
            rates = {"grammar": (1.0, 1.0, 1.0), "eagle3": (0.8, 0.6)}.get(config.method[0], ())
            self.traits = Traits(acceptance_by_level=rates)

    drafters, form = DrafterPool(Told, Rule.COUPLED, None), AnswerHints(grammar=True)
    rates = {}
    for method in ("grammar", "ngram", "eagle3"):
        plan = drafters.resolve({"method": method, **({"model": "x"} if method == "eagle3" else {})}, form)
        assert plan is not None
        rates[plan.method] = plan.drafter.traits.acceptance_by_level
    assert rates["grammar"] == rates["grammar+ngram"] == (1.0, 1.0, 1.0)
    assert rates["grammar+eagle3"] == pytest.approx((0.9, 0.8))


def test_tokens_without_a_choice_are_expected_to_come():
    assert min(GrammarDrafter.traits.acceptance_by_level[:HINTED_DRAFT_TOKENS]) > 0.9
