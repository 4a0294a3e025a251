import random

import pytest

from foreword.drafters.lookup.suffix import MOST_TENANTS, SuffixConfig, SuffixDrafter, SuffixStore
from foreword.errors import RequestError
from foreword.speculation.draft import ROOT, Draft
from helpers.asks import ask, text_request


def paths(draft: Draft) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), token))
    return set(found)


def test_a_long_match_is_continued_and_a_short_one_only_shortly():
    drafter = SuffixDrafter(SuffixConfig(depth_per_match=1.0))
    text = [*range(20), 90, 0, 1, 2]
    assert drafter.propose([ask(text)])[0].tokens == (3, 4, 5)
    text = [*range(20), 90, 0, 1, 2, 3, 4]
    assert drafter.propose([ask(text)])[0].tokens == (5, 6, 7, 8, 9)


def test_an_undecided_past_gives_a_tree_by_frequency():
    text = [1, 2, 5, 8, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2]
    draft = SuffixDrafter(SuffixConfig(min_probability=0.3)).propose([ask(text)])[0]
    assert draft.tokens[0] == 5  # two of three
    assert (6,) in paths(draft)  # one of three
    sure = SuffixDrafter(SuffixConfig(min_probability=0.5)).propose([ask(text)])[0]
    assert paths(sure) == {(5,)}


def test_a_repeating_text_is_repeated_on():
    draft = SuffixDrafter(SuffixConfig()).propose([ask([7, 8, 9] * 5, 8)])[0]
    assert draft.tokens == (7, 8, 9, 7, 8, 9, 7, 8)


def test_node_and_depth_limits_hold():
    drafter = SuffixDrafter(SuffixConfig(min_probability=0.01))
    rng = random.Random(0)
    text = [rng.randrange(3) for _ in range(300)]
    for nodes, depth in [(0, 5), (5, 0), (1, 5), (7, 2), (64, 64)]:
        draft = drafter.propose([ask(text, nodes, depth)])[0]
        assert len(draft) <= nodes
        assert max(draft.depths(), default=0) <= depth


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3]])
def test_nothing_known_is_nothing_said(text: list[int]):
    assert len(SuffixDrafter(SuffixConfig()).propose([ask(text)])[0]) == 0


def finish(drafter: SuffixDrafter, prompt: list[int], answer: list[int], tenant: str) -> None:
    request = text_request(prompt + answer, prompt_len=len(prompt), tenant=tenant)
    drafter.propose([ask(request)])
    drafter.forget(request)


def test_past_answers_help_their_own_tenant_and_nobody_else():
    drafter = SuffixDrafter(SuffixConfig())
    finish(drafter, [50], [1, 2, 3, 4, 5, 6], tenant="alice")
    for tenant, expected in (("alice", (3, 4, 5, 6)), ("bob", ()), ("", ())):
        request = text_request([70, 1, 2], prompt_len=1, tenant=tenant)
        assert drafter.propose([ask(request, 4)])[0].tokens == expected


def test_prompts_are_not_remembered():
    drafter = SuffixDrafter(SuffixConfig())
    finish(drafter, [1, 2, 3, 4, 5], [9, 9], tenant="alice")
    assert len(drafter.propose([ask(text_request([8, 1, 2], tenant="alice"))])[0]) == 0


def test_the_store_is_bounded_and_the_oldest_go_first():
    drafter = SuffixDrafter(SuffixConfig(max_stored_tokens=100))
    for number in range(50):
        finish(drafter, [0], [1000 + number * 10 + i for i in range(10)], tenant="t")
        assert drafter.store("t").num_tokens <= 100

    def remembers(number: int) -> bool:
        start = 1000 + number * 10
        return len(drafter.propose([ask(text_request([start, start + 1], tenant="t"))])[0]) > 0

    assert remembers(49)
    assert not remembers(0)


def test_an_answer_longer_than_the_store_keeps_its_end():
    drafter = SuffixDrafter(SuffixConfig(max_stored_tokens=10))
    finish(drafter, [0], list(range(100, 130)), tenant="t")
    assert drafter.store("t").num_tokens == 5  # what one of its two generations holds
    assert drafter.propose([ask(text_request([125, 126], tenant="t"), 2)])[0].tokens == (127, 128)


def test_a_full_store_makes_room_without_building_anything_anew():
    """The engine waits while a request is forgotten: the work is that of the new answer alone."""
    store = SuffixStore(max_tokens=1000)
    for number in range(200):
        before = store.automata[-1]
        store.add(range(10 * number, 10 * number + 10))
        assert store.automata[-1] is before or store.automata[-1].num_tokens == 10
        assert all(automaton.num_tokens <= 500 for automaton in store.automata)
    assert len(store.automata) == 2


@pytest.mark.parametrize("seed", range(10))
def test_a_store_that_changes_under_a_running_request_is_matched_again(seed: int):
    """The draft of a request that ran on while others ended is that of a fresh reader of the same text."""
    rng = random.Random(seed)
    drafter = SuffixDrafter(SuffixConfig(max_stored_tokens=200))
    request = text_request([0])
    for _ in range(30):
        request.tokens.extend(rng.randrange(4) for _ in range(3))
        finish(drafter, [9], [rng.randrange(4) for _ in range(20)], tenant="")
        running = drafter.propose([ask(request)])[0]
        fresh = text_request(list(request.tokens))
        assert drafter.propose([ask(fresh)])[0].tokens == running.tokens
        drafter._known.pop(fresh.request_id)


def test_forgetting_a_request_that_never_drafted_stores_nothing():
    drafter = SuffixDrafter(SuffixConfig())
    drafter.forget(text_request([1, 2, 3]))
    assert drafter.store("").num_tokens == 0


@pytest.mark.parametrize(
    "bad", [{"min_match": 0}, {"depth_per_match": 0}, {"min_probability": 0}, {"max_stored_tokens": -1}]
)
def test_bad_settings_are_refused_by_name(bad: dict):
    with pytest.raises(RequestError, match=next(iter(bad))):
        SuffixConfig(**bad)


def test_the_past_of_tenants_who_stay_away_is_forgotten():
    drafter = SuffixDrafter(SuffixConfig(min_match=1))
    first = drafter.store("first")
    for number in range(MOST_TENANTS):
        drafter.store("regular").add([1, 2, 3])
        drafter.store(f"tenant {number}")
    assert len(drafter._stores) == MOST_TENANTS
    assert "regular" in drafter._stores
    assert drafter.store("first") is not first
