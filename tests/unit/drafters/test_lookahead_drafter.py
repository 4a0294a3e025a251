"""The window of lookahead decoding, its pool, and how both fit into a draft."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from foreword.drafters.lookup.lookahead import LookaheadConfig, LookaheadDrafter, NgramPool, fitting_window
from foreword.drafters.registry import drafter_kinds
from foreword.errors import RequestError
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Commit
from helpers.asks import ask, text_request
from helpers.trees import root_path

SMALL = LookaheadConfig(window_size=3, ngram_size=4, guess_set_size=2, pool_from_prompt=False)
WHOLE = 3 * 3 + 2 * 3 - 1
Target = Callable[[Sequence[int]], int]


def judged(draft: Draft, text: list[int], target: Target, request_id: int = 7) -> Commit:
    """The draft judged by a greedy target; the text is grown by what is accepted and one token more."""
    histories = [list(text)]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        histories.append([*histories[parent + 1], token])
    draws = tuple(target(history) for history in histories)
    node = -1
    while True:
        text.append(draws[node + 1])
        below = [n for n, p in enumerate(draft.parents) if p == node and draft.tokens[n] == text[-1]]
        if not below:
            break
        node = below[0]
    request = text_request(list(text), prompt_len=2, request_id=request_id)
    return Commit(request, first=0, rows=0, draft=draft, draws=draws)


def turn(drafter: LookaheadDrafter, text: list[int], target: Target, nodes: int = WHOLE) -> Draft:
    request = text_request(list(text), prompt_len=2, request_id=7)
    (draft,) = drafter.propose([ask(request, nodes)])
    drafter.observe([judged(draft, text, target)])
    return draft


def shuffled(tokens: Sequence[int]) -> int:
    """A target that hardly ever repeats itself: all that it says is its own."""
    return 100 + (sum((place + 3) * token for place, token in enumerate(tokens[-3:])) * 7919) % 900


def counting(tokens: Sequence[int]) -> int:
    return (tokens[-1] + 1) % 50


def window_of(drafter: LookaheadDrafter) -> list[list[int]]:
    return drafter._known[7]._rows


def test_the_window_is_a_tree_of_columns_below_the_first_row():
    drafter, text = LookaheadDrafter(SMALL), [5, 6]
    for _ in range(4):
        turn(drafter, text, shuffled)
    first, *others = [list(row) for row in window_of(drafter)]
    assert [len(row) for row in (first, *others)] == [3, 3, 3]
    (draft,) = drafter.propose([ask(text_request(list(text), prompt_len=2, request_id=7), WHOLE)])
    paths = [[draft.tokens[n] for n in root_path(draft, node)] for node in range(len(draft))]
    for column in range(3):
        for row in range(3):
            below = [other[column] for other in others[:row]]
            if row + column:
                assert [*first[1 : column + 1], *below] in paths
    depths = sorted(draft.depths())
    assert depths == sorted(row + column for row in range(3) for column in range(3) if row + column)


def test_what_was_drawn_after_the_last_row_is_the_next_and_every_column_an_ngram():
    drafter, text = LookaheadDrafter(SMALL), [5, 6]
    for _ in range(4):
        turn(drafter, text, shuffled)
    before, newest, pool = [list(row) for row in window_of(drafter)], text[-1], drafter._known[7].pool
    known = list(text)
    turn(drafter, text, shuffled)
    after = window_of(drafter)
    assert after[:2] == before[1:]
    for column in range(3):
        line = [*known, *before[0][1 : column + 1], *(row[column] for row in before[1:])]
        assert after[2][column] == shuffled(line)
        key = before[0][column] if column else newest
        assert (*(row[column] for row in before[1:]), shuffled(line)) in pool.after(key)


def test_guesses_come_from_the_pool_and_save_passes():
    drafter, text, passes = LookaheadDrafter(SMALL), [3, 4], 0
    while len(text) < 200:
        turn(drafter, text, counting)
        passes += 1
    assert text == [(3 + place) % 50 for place in range(len(text))]
    assert passes < 100


def test_the_text_of_the_prompt_is_in_the_pool_if_wanted():
    prompt = [1, 2, 3, 4, 5, 6, 1]
    for wanted, expected in ((True, (2, 3, 4)), (False, None)):
        drafter = LookaheadDrafter(replace(SMALL, pool_from_prompt=wanted))
        (draft,) = drafter.propose([ask(text_request(prompt, prompt_len=7), WHOLE)])
        paths = [tuple(draft.tokens[n] for n in root_path(draft, node)) for node in range(len(draft))]
        assert (expected in paths) == wanted


@pytest.mark.parametrize("seed", range(8))
def test_drafts_keep_to_every_budget_and_windows_survive_its_changes(seed: int):
    rng = random.Random(seed)
    config = LookaheadConfig(rng.randint(1, 8), rng.randint(2, 7), rng.randint(1, 8), pool_size=64)
    drafter, text = LookaheadDrafter(config), [3, 4]
    for _ in range(60):
        nodes, depth = rng.randint(1, 64), rng.randint(1, 12)
        request = text_request(list(text), prompt_len=2, request_id=7)
        (draft,) = drafter.propose([ask(request, nodes, depth)])
        assert len(draft) <= nodes
        assert draft.depth <= depth
        assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft)
        cut = draft.within(rng.randint(0, 64), depth) if rng.random() < 0.3 else draft
        if rng.random() < 0.8:  # a pass may fail, and nobody hears of it
            drafter.observe([judged(cut, text, counting)])
        assert len(drafter._known[7].pool) <= 64
    assert text == [(3 + place) % 50 for place in range(len(text))]


def test_another_drafters_draft_leaves_the_window_alone():
    drafter, text = LookaheadDrafter(SMALL), [5, 6]
    for _ in range(4):
        turn(drafter, text, shuffled)
    before = [list(row) for row in window_of(drafter)]
    drafter.observe([judged(Draft.chain([1, 2, 3], len(text)), text, shuffled)])
    assert window_of(drafter) == before


def test_a_request_that_is_gone_is_not_taken_up_again():
    drafter, text = LookaheadDrafter(SMALL), [5, 6]
    draft = turn(drafter, text, shuffled)
    drafter.forget(text_request(text, request_id=7))
    drafter.observe([judged(draft, text, shuffled)])
    assert not drafter._known


def test_window_and_guesses_share_the_nodes():
    config = LookaheadConfig()
    assert fitting_window(config, 64, 64) == (4, 7)
    assert fitting_window(config, 55, 64).nodes == 27
    assert fitting_window(config, 5, 64) == (2, 2)
    assert fitting_window(config, 55, 3) == (3, 2)
    assert fitting_window(config, 1, 1) == (1, 2)  # a single guess


@pytest.mark.parametrize(
    ("key", "value"),
    [("window_size", 0), ("ngram_size", 1), ("guess_set_size", 0), ("pool_size", 0), ("pool_from_prompt", 1)],
)
def test_senseless_settings_are_refused_by_name(key: str, value: int):
    with pytest.raises(RequestError, match=key):
        drafter_kinds()["lookahead"].configure({key: value})


def test_the_pool_forgets_what_was_used_longest_ago():
    pool = NgramPool(per_token=2, max_grams=4)
    for gram in ((1, 2), (3, 4), (5, 6)):
        pool.add(9, gram)
    assert pool.after(9) == [(5, 6), (3, 4)]
    pool.add(9, (3, 4))
    assert pool.after(9) == [(3, 4), (5, 6)]
    pool.add(7, (1, 1))
    pool.add(8, (1, 1))
    assert len(pool) == 4
    pool.after(9)  # so that 7 is the oldest
    pool.add(6, (1, 1))
    assert len(pool) == 4
    assert pool.after(7) == []
    assert pool.after(9) == [(3, 4), (5, 6)]


def test_what_the_pool_holds_is_counted_under_any_use():
    rng, pool = random.Random(3), NgramPool(per_token=3, max_grams=20)
    for _ in range(2000):
        pool.add(rng.randrange(12), (rng.randrange(5), rng.randrange(5)))
        assert len(pool) == sum(len(pool.after(token)) for token in range(12)) <= 20
