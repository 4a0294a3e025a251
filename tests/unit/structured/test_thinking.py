"""Reasoning before an answer: its budget forces the end tag, and a grammar begins after it."""

import random

import numpy as np
import pytest

from foreword.structured.params import StructuredOutputs
from foreword.structured.state import GrammarError, unpacked
from foreword.structured.thinking import ThinkingState, ThinkingTags
from helpers.tiny_grammars import CONTROL, END, OTHER_END, PIECES, encode, grammars

TAGS = ThinkingTags(
    b"ab",
    b"cc1",
    tuple(encode("ab")),
    tuple(encode("cc1")),
    PIECES.__getitem__,
    len(PIECES),
    (END, OTHER_END),
)
KEPT = grammars()
EVERYTHING = list(PIECES)


def allowed(state: ThinkingState, ahead: tuple[int, ...] = ()) -> list[bytes]:
    chain = state.masks(list(ahead), range(-1, len(ahead) - 1))
    return [PIECES[i] for i in np.flatnonzero(unpacked(chain, len(PIECES))[-1])]


def after(state: ThinkingState, text: str) -> list[bytes]:
    return allowed(state, tuple(encode(text)))


def test_the_end_tag_is_forced_when_the_budget_is_used_up():
    state = ThinkingState(TAGS, 3, is_open=True)
    assert after(state, "xx") == EVERYTHING
    assert after(state, "xxx") == [b"cc"]
    assert after(state, "xxxcc") == [b"1"]
    assert after(state, "xxxcc1") == EVERYTHING
    assert after(state, "xxxcc1xxxxxxx") == EVERYTHING
    assert state.forced(8) == []
    state.commit(encode("xxx"))
    assert state.forced(8) == list(TAGS.end_ids)
    assert state.forced(1) == list(TAGS.end_ids[:1])
    assert state.follows([*TAGS.end_ids, CONTROL], [-1, 0, 1]) == [True, True, True]
    assert state.follows([CONTROL, *TAGS.end_ids], [-1, 0, 1]) == [False, False, False]
    with pytest.raises(GrammarError, match="end of the reasoning"):
        state.commit([CONTROL])
    state.commit(TAGS.end_ids)
    assert allowed(state) == EVERYTHING


def test_a_budget_of_nothing_ends_at_once():
    assert allowed(ThinkingState(TAGS, 0, is_open=True)) == [b"cc"]


def test_an_end_that_other_tokens_spell_is_one():
    state = ThinkingState(TAGS, 5, is_open=True)
    state.commit([PIECES.index(b"c"), PIECES.index(b"c"), PIECES.index(b"1")])
    assert after(state, "xxxxxxxx") == EVERYTHING


def test_a_half_end_tag_does_not_end_it():
    state = ThinkingState(TAGS, 2, is_open=True)
    assert after(state, "cc") == EVERYTHING
    assert after(state, "xcc") == [b"cc"]


def test_an_answer_may_begin_with_reasoning_or_have_none():
    state = ThinkingState(TAGS, 2, is_open=False)
    assert after(state, "xxxxxx") == EVERYTHING
    assert after(state, "\nab") == EVERYTHING
    assert allowed(state, (PIECES.index(b"a"), PIECES.index(b"b"), *encode("xx"))) == [b"cc"]
    assert after(state, "abxx") == [b"cc"]
    assert after(state, "xabxx") == EVERYTHING


def test_a_grammar_begins_after_the_reasoning_and_no_answer_ends_before():
    choice = StructuredOutputs(choice=["xa"])
    state = ThinkingState(TAGS, 3, is_open=True, grammar=KEPT.begin(choice))
    assert set(EVERYTHING) - set(allowed(state)) == {PIECES[END], PIECES[OTHER_END]}
    assert after(state, "bbbcc1") == [b"x"]
    state.commit(encode("bcc1"))
    assert allowed(state) == [b"x"]
    state.commit(encode("x"))
    assert allowed(state) == [b"a"]
    assert state.forced(4) == [PIECES.index(b"a"), END]
    with pytest.raises(GrammarError):
        state.commit(encode("x"))
    state.commit(encode("a"))
    assert allowed(state) == [PIECES[END], PIECES[OTHER_END]]


def test_without_reasoning_the_grammar_begins_at_once():
    state = ThinkingState(TAGS, 3, is_open=False, grammar=KEPT.begin(StructuredOutputs(choice=["xa"])))
    assert allowed(state) == [b"ab", b"x"]
    state.commit(encode("x"))
    assert allowed(state) == [b"a"]


def test_looking_ahead_says_what_reading_says():
    rng = random.Random(5)
    for case in range(200):
        form = StructuredOutputs(regex="(ab|c|x){1,9}") if case % 2 else None
        budget, is_open = rng.choice([None, 0, 1, 4]), rng.random() < 0.5

        def fresh(budget=budget, is_open=is_open, form=form) -> ThinkingState:
            return ThinkingState(TAGS, budget, is_open, None if form is None else KEPT.begin(form))

        ahead: tuple[int, ...] = ()
        looking, reading = fresh(), fresh()
        for _ in range(12):
            may = allowed(looking, ahead)
            assert may == allowed(reading)
            token = PIECES.index(rng.choice([piece for piece in may if piece != PIECES[CONTROL]]))
            ahead = (*ahead, token)
            reading.commit([token])
            if token in (END, OTHER_END):
                break
        looking.commit(ahead)
        assert allowed(looking) == allowed(reading)
