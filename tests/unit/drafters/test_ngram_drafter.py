import random

import pytest

from foreword.drafters.lookup.ngram import NgramConfig, NgramDrafter
from foreword.errors import RequestError
from foreword.speculation.confidence import class_of
from helpers.asks import ask, text_request


def guess(text: list[int], max_nodes: int = 4, **config: int) -> list[int]:
    draft = NgramDrafter(NgramConfig(**config)).propose([ask(text, max_nodes)])[0]
    assert draft.committed_len == len(text)
    assert draft.parents == tuple(range(-1, len(draft) - 1))
    return list(draft.tokens)


def test_what_followed_follows_again():
    assert guess([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6, 9]


def test_the_longest_match_wins_over_a_newer_shorter_one():
    text = [1, 2, 3, 70, 8, 2, 3, 60, 8, 1, 2, 3]
    assert guess(text, 1, prompt_lookup_max=3) == [70]
    assert guess(text, 1, prompt_lookup_max=2) == [60]


def test_the_most_frequent_continuation_wins_then_the_most_recent():
    assert guess([1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 2], 1, prompt_lookup_max=2) == [5]
    assert guess([1, 2, 5, 1, 2, 6, 1, 2, 5, 1, 2], 1, prompt_lookup_max=2) == [5]
    assert guess([1, 2, 5, 1, 2, 6, 1, 2], 1, prompt_lookup_max=2) == [6]


def test_a_repeating_text_is_repeated_on():
    assert guess([7, 8, 9, 7, 8, 9, 7], 8) == [8, 9, 7, 8, 9, 7, 8, 9]


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3, 4, 5]])
def test_nothing_known_is_nothing_said(text: list[int]):
    assert guess(text) == []


def test_a_match_shorter_than_the_minimum_does_not_count():
    assert guess([1, 2, 3, 9, 3], prompt_lookup_min=2) == []
    assert guess([1, 2, 3, 9, 3], 1, prompt_lookup_min=1) == [9]


def test_the_longer_the_match_the_surer():
    """Every guess that is right makes the match longer, beyond what is looked up, too."""
    text = list(range(20))
    drafter = NgramDrafter(NgramConfig(prompt_lookup_max=2))
    (short,), (long,) = (drafter.propose([ask([*text, 99, *text[2:end]], 3)]) for end in (4, 16))
    assert short.tokens == (4, 5, 6) and long.tokens == (16, 17, 18)
    assert [class_of(one) for one in short.confidence] == [4, 5, 5]
    assert [class_of(one) for one in long.confidence] == [7, 7, 7]
    at_the_start = NgramDrafter(NgramConfig()).propose([ask([1, 2, 3, 1, 2], 2)])[0]
    assert at_the_start.tokens == (3, 1) and len(at_the_start.confidence) == 2


def test_guesses_stay_within_nodes_and_depth():
    drafter = NgramDrafter(NgramConfig())
    text = [1, 2, 3] * 10
    for nodes, depth in [(0, 9), (9, 0), (3, 9), (9, 2)]:
        assert len(drafter.propose([ask(text, nodes, depth)])[0]) == min(nodes, depth)


@pytest.mark.parametrize("seed", range(10))
def test_growing_step_by_step_equals_reading_at_once(seed: int):
    rng = random.Random(seed)
    drafter, request = NgramDrafter(NgramConfig()), text_request([1])
    for _ in range(60):
        request.tokens.extend(rng.randrange(4) for _ in range(rng.randint(1, 5)))
        assert list(drafter.propose([ask(request)])[0].tokens) == guess(request.tokens, 8)


def test_a_text_that_shrank_or_was_rebuilt_is_read_anew():
    drafter, request = NgramDrafter(NgramConfig()), text_request([1, 2, 3, 4, 1, 2])
    assert drafter.propose([ask(request, 1)])[0].tokens == (3,)
    request = request._replace(tokens=[5, 6, 7, 5, 6])
    assert drafter.propose([ask(request, 1)])[0].tokens == (7,)
    request = request._replace(tokens=[5, 6, 8, 9, 5, 6, 8], epoch=1)
    assert drafter.propose([ask(request, 1)])[0].tokens == (9,)


def test_forgetting_frees_the_index():
    drafter, request = NgramDrafter(NgramConfig()), text_request([1, 2, 1, 2])
    drafter.propose([ask(request)])
    drafter.forget(request)
    drafter.forget(request)
    assert drafter._known == {}


def test_a_step_does_the_same_work_at_any_length_of_text():
    """Counted, not timed: a step learns its new tokens and looks up once, however long the text is."""

    class CountingList(list):
        reads = 0

        def __getitem__(self, key):
            CountingList.reads += 1
            return super().__getitem__(key)

    reads = []
    for length in (100, 8000):
        drafter = NgramDrafter(NgramConfig())
        request = text_request([random.Random(1).randrange(50) for _ in range(length)])
        drafter.propose([ask(request)])
        index = drafter._known[request.request_id][1]
        index._tokens = CountingList(index._tokens)
        CountingList.reads = 0
        request.tokens.append(3)
        drafter.propose([ask(request)])
        reads.append(CountingList.reads)
    assert reads[1] <= reads[0] + 16


@pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3)])
def test_bad_sizes_are_refused(low: int, high: int):
    with pytest.raises(RequestError, match="prompt_lookup_min"):
        NgramConfig(prompt_lookup_min=low, prompt_lookup_max=high)
