"""Jacobi decoding: a fixed-point iteration over the tokens to come."""

from collections.abc import Callable, Sequence

from foreword.drafters.lookup.jacobi import JacobiDrafter
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Commit
from helpers.asks import ask, text_request

Target = Callable[[Sequence[int]], int]


def turn(drafter: JacobiDrafter, text: list[int], target: Target, nodes: int = 4) -> Draft:
    """One pass over a chain with a greedy target; the text is grown."""
    request = text_request(list(text), prompt_len=2, request_id=7)
    (draft,) = drafter.propose([ask(request, nodes)])
    line = [*text, *draft.tokens]
    draws = tuple(target(line[: len(text) + place]) for place in range(len(draft) + 1))
    accepted = 0
    while accepted < len(draft) and draft.tokens[accepted] == draws[accepted]:
        accepted += 1
    end = draft.committed_len
    text += draws[: accepted + 1]
    grown = text_request(list(text), prompt_len=2, request_id=7)
    drafter.observe([Commit(grown, first=0, rows=0, draft=draft, draws=draws)])
    assert draft.committed_len == end
    return draft


def by_place(tokens: Sequence[int]) -> int:
    return len(tokens) * 31 % 97


def by_last(tokens: Sequence[int]) -> int:
    return (tokens[-1] * 5 + 3) % 101


def test_where_only_the_place_counts_everything_is_right_from_the_second_pass_on():
    drafter, text = JacobiDrafter(), [1, 2]
    turn(drafter, text, by_place)
    for length in (3 + 4, 3 + 4 + 1, 3 + 4 + 1 + 4):  # what was not judged before is a first guess
        turn(drafter, text, by_place)
        assert len(text) >= length
    assert text[2:] == [by_place(range(place)) for place in range(2, len(text))]


def test_each_pass_sets_one_more_place_right_and_the_text_is_the_targets():
    drafter, text = JacobiDrafter(), [1, 2]
    for passes in range(1, 40):
        turn(drafter, text, by_last)
        assert len(text) >= 2 + passes
    plain = [1, 2]
    while len(plain) < len(text):
        plain.append(by_last(plain))
    assert text == plain


def test_the_next_guesses_are_what_was_drawn_behind_the_texts_new_end():
    drafter, text = JacobiDrafter(), [1, 2]
    first = turn(drafter, text, by_last)
    line = [1, 2, *first.tokens]
    grown = len(text) - 2
    drawn = [by_last(line[: 2 + place]) for place in range(5)]
    (second,) = drafter.propose([ask(text_request(list(text), prompt_len=2, request_id=7), 4)])
    assert list(second.tokens[: 5 - grown]) == drawn[grown:]


def test_guesses_move_on_with_a_text_that_grew_without_them():
    drafter = JacobiDrafter()
    (first,) = drafter.propose([ask(text_request([1, 2], prompt_len=2, request_id=7), 4)])
    (second,) = drafter.propose([ask(text_request([1, 2, 8, 9], prompt_len=2, request_id=7), 4)])
    assert second.tokens[:2] == first.tokens[2:]


def test_what_the_target_could_not_draw_is_not_guessed():
    drafter = JacobiDrafter()
    request = text_request([1, 2], prompt_len=2, request_id=7)
    (draft,) = drafter.propose([ask(request, 4)])
    grown = text_request([1, 2, 9], prompt_len=2, request_id=7)
    drafter.observe([Commit(grown, first=0, rows=0, draft=draft, draws=(9, 5, -1, 6, 7))])
    (after,) = drafter.propose([ask(grown, 4)])
    assert after.tokens[0] == 5
    assert set(after.tokens[1:]) <= {1, 2}  # of the prompt
    drafter.forget(grown)
    assert not drafter._known
