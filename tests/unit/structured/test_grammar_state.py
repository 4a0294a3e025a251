"""Where an answer stands in its grammar: only what is committed moves it."""

import random

import numpy as np
import pytest

from foreword.structured.params import StructuredOutputs
from foreword.structured.state import MAX_FORCED, GrammarError, GrammarState, paths, unpacked
from helpers.tiny_grammars import CONTROL, END, OTHER_END, PIECES, allowed, encode, fresh, grammars

OBJECT = StructuredOutputs(
    json={
        "type": "object",
        "properties": {
            "abc": {"enum": ["a", "abc", "x"]},
            "cab": {"type": "array", "items": {"enum": [1, 23]}},
        },
        "required": ["abc"],
        "additionalProperties": False,
    }
)
FORMS = [
    OBJECT,
    StructuredOutputs(regex="(ab|abc|c){1,3}x?"),
    StructuredOutputs(choice=["abc", "ab", "cab", "é"]),
    StructuredOutputs(grammar='root ::= "a" root "b" | "c"'),
    StructuredOutputs(json={"type": "array", "items": {"enum": ["a", 1]}}, whitespace_pattern=r"[ \n]*"),
]
KEPT = grammars()


def test_what_may_come_follows_the_text():
    state = KEPT.begin(StructuredOutputs(regex="ab(c|x)"))
    assert allowed(state) == [b"ab"] or b"a" in allowed(state)
    state.commit(encode("ab"))
    assert allowed(state) == [b"c", b"x"]


def test_a_long_text_without_a_choice_is_looked_up_in_parts():
    """What is kept of one that never ends would have no end either."""
    state = KEPT.begin(StructuredOutputs(choice=["abc" * 300]))
    assert len(allowed(state)) == 1
    assert len(state.forced(10)) == 10
    for _ in range(3):
        assert len(state.forced(400)) == MAX_FORCED
        assert len(state._masks) <= 2 * MAX_FORCED
        state.commit(state.forced(40))


def test_a_complete_answer_can_only_end_and_any_end_will_do():
    state = KEPT.begin(StructuredOutputs(choice=["c"]))
    assert allowed(state) == [b"c"]
    state.commit(encode("c"))
    assert allowed(state) == [PIECES[END], PIECES[OTHER_END]]
    state.commit([OTHER_END])
    assert allowed(state) == [PIECES[END], PIECES[OTHER_END]]


def test_an_answer_may_end_where_it_is_complete_and_go_on_where_it_could():
    state = KEPT.begin(StructuredOutputs(regex="c+"))
    assert PIECES[END] not in allowed(state)
    state.commit(encode("c"))
    assert set(allowed(state)) == {b"c", b"cc", PIECES[END], PIECES[OTHER_END]}


def test_control_tokens_are_no_text():
    state = KEPT.begin(StructuredOutputs(regex=r"(.|\n)*"))
    assert PIECES[CONTROL] not in allowed(state)
    with pytest.raises(GrammarError):
        state.commit([CONTROL])


def test_a_token_that_cannot_come_changes_nothing():
    state = KEPT.begin(OBJECT)
    before = allowed(state)
    with pytest.raises(GrammarError):
        state.commit([*encode('{"abc'), *encode("x")])
    assert allowed(state) == before
    state.commit(encode('{"abc": "x"}'))
    assert allowed(state) == [PIECES[END], PIECES[OTHER_END]]


def random_tree(rng: random.Random, state: GrammarState) -> tuple[list[int], list[int]]:
    """Nodes most of which the grammar allows; some behind ends and behind nodes that cannot come."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(rng.randrange(1, 9)):
        parent = rng.randrange(-1, node)
        path = paths([*tokens, 0], [*parents, parent])[-1][:-1]
        masks = unpacked(state.masks_after([path]), len(PIECES))[0]
        possible = np.flatnonzero(masks).tolist()
        likely = possible and rng.random() < 0.8
        tokens.append(rng.choice(possible) if likely else rng.randrange(len(PIECES)))
        parents.append(parent)
    return tokens, parents


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.form)
def test_every_node_has_the_mask_of_its_own_history(form: StructuredOutputs):
    """Against parsers that read each history from the start, in long random texts with random trees ahead."""
    for seed in range(12):
        rng = random.Random(seed)
        text: list[int] = []
        state = KEPT.begin(form)
        while len(text) < 12 and END not in text:
            tokens, parents = random_tree(rng, KEPT.begin(form) if not text else fresh(KEPT, form, text))
            found = unpacked(state.masks(tokens, parents), len(PIECES))
            follows = state.follows(tokens, parents)
            assert len(state.forced(5)) <= 5
            for node, path in enumerate(paths(tokens, parents)):
                try:
                    slow = fresh(KEPT, form, [*text, *path])
                except GrammarError:
                    continue
                if follows[node]:
                    assert np.array_equal(found[1 + node], unpacked(slow.masks((), ()), len(PIECES))[0])
            here = np.flatnonzero(found[0]).tolist()
            assert [token in here for token, parent in zip(tokens, parents, strict=True) if parent < 0] == [
                known for known, parent in zip(follows, parents, strict=True) if parent < 0
            ]
            step = [rng.choice(here)]
            state.commit(step)
            text += step


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.form)
def test_what_is_forced_is_all_that_may_come(form: StructuredOutputs):
    for seed in range(6):
        rng = random.Random(seed)
        state, text = KEPT.begin(form), []
        while END not in text and OTHER_END not in text and len(text) < 30:
            forced = state.forced(8)
            chain = forced, range(-1, len(forced) - 1)
            own = [token for token in forced if token != END]
            slow = [fresh(KEPT, form, [*text, *own[:place]]).masks((), ()) for place in range(len(own) + 1)]
            masks = unpacked(np.concatenate(slow), len(PIECES))
            assert np.array_equal(unpacked(state.masks(*chain), len(PIECES))[: len(masks)], masks)
            for token, mask in zip(forced, masks, strict=False):
                assert mask[token] and (mask.sum() == 1 or token == END)
            step = forced[: rng.randrange(1, 4)] or [int(rng.choice(np.flatnonzero(masks[0])))]
            state.commit(step)
            text += step


def test_the_end_is_forced_where_nothing_else_can_come():
    state = KEPT.begin(StructuredOutputs(choice=["abc"]))
    assert state.forced(8) == [*encode("abc"), END]
    assert state.forced(1) == encode("abc")[:1]
    state.commit([*encode("abc"), END])
    assert state.forced(8) == []


def test_answers_to_one_prompt_do_not_share_their_place():
    first, second = KEPT.begin(OBJECT), KEPT.begin(OBJECT)
    first.commit(encode('{"abc": "x'))
    assert allowed(second) == allowed(KEPT.begin(OBJECT)) != allowed(first)
