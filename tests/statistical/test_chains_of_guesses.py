"""Chains of three guesses, drawn by a model that drafts, keep the target's law under every rule.

A Markov pair: both decoders put about 0.8 on one of three tokens, which one depends on the last two, so that a q of the
wrong place, of the wrong level or a little too flat shows. All else is the real thing: engine, step,
`AutoregressiveDrafter` with its KV cache, `GrowingTree`, `grow_chains`.

Power, with SAMPLES texts of LENGTH tokens per rule and one false alarm in a thousand: a next-token law that is off by a
total variation of 0.04 after any two tokens is seen in at least 99 of 100 runs, one off by 0.032 in 90; a law of whole
texts that is off by 0.095 in 99, by 0.08 in 85. With MANY texts these are 0.025 and 0.02, 0.06 and 0.05. Each in the
direction that shows least, so that any other bias of this size is seen as often or more. What is smaller (a q tempered
by 0.9 is at the edge) is left to the test in which the drafter is the target: that has no noise.
`test_these_biases_would_be_seen` computes this from simulated runs.
"""

from collections.abc import Sequence

import pytest

from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from helpers.guessed_texts import (
    CHAIN,
    MANY,
    OTHER,
    SAMPLES,
    TARGET,
    answers,
    check_law,
    expected,
    model_drafter,
    other_ids,
)
from helpers.markov_pair import peaked_logits
from helpers.text_statistics import least_visible, total_variation

FEWER = 800
"""Enough for a total variation of 0.065 after any two tokens."""

RULES = ("token", "block", "coupled")
DRAWING_RULES = ("token", "block")


def test_these_biases_would_be_seen():
    for test, of_tokens, of_texts in (
        (expected(), (0.04, 0.032), (0.095, 0.08)),
        (expected(MANY), (0.025, 0.02), (0.06, 0.05)),
    ):
        for bias, power in zip(of_tokens, (0.99, 0.9), strict=True):
            skewed = least_visible(test.after, bias)
            assert total_variation(skewed, test.after) == pytest.approx(bias)
            assert test.power(test.law_of(skewed)) >= power
        for bias, power in zip(of_texts, (0.99, 0.85), strict=True):
            skewed = least_visible(test.law, bias)
            assert total_variation(skewed, test.law) == pytest.approx(bias)
            assert test.power(skewed) >= power
    fewer = expected(FEWER)
    assert fewer.power(fewer.law_of(least_visible(fewer.after, 0.065))) >= 0.99
    assert test.power(test.law) <= 0.003  # false alarms


@pytest.mark.parametrize(("rule", "samples"), [("token", MANY), ("block", SAMPLES), ("coupled", SAMPLES)])
def test_chains_of_three_keep_the_law(rule: str, samples: int):
    found = answers(rule, model_drafter(OTHER), samples)
    assert len(found.guesses("drafted")) == CHAIN
    assert min(found.guesses("accepted")) > samples / 5
    assert min(found.guesses("rejected")) > samples / 20
    check_law(found.texts)


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_is_the_target_has_every_guess_accepted(rule: str):
    """No statistics here: a q that is not quite what was drawn from, or another noise, costs acceptance at once."""
    found = answers(rule, model_drafter(TARGET), 200)
    assert found.guesses("accepted") == found.guesses("drafted") == [200] * CHAIN


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_is_the_target_with_other_token_ids_has_every_guess_accepted(rule: str):
    found = answers(rule, other_ids(TARGET, {0: 2, 1: 0, 2: 1}), 200)
    assert found.guesses("accepted") == found.guesses("drafted") == [200] * CHAIN


@pytest.mark.parametrize("rule", DRAWING_RULES)
def test_a_draft_model_that_lacks_a_token_keeps_the_law(rule: str):
    """q covers the tokens that both have; what the target gives to the third one is left to the correction."""
    found = answers(rule, other_ids(OTHER, {0: 2, 1: 0}), FEWER)
    assert min(found.guesses("rejected")) > FEWER / 40  # the last level is seldom reached
    check_law(found.texts)


@pytest.mark.parametrize("rule", DRAWING_RULES)
def test_a_draft_model_with_padding_ids_keeps_the_law(rule: str):
    """Its padding is as likely as its best token; a draft that is dropped for such an id would bias the rest."""
    padded = peaked_logits(seed=3, padding=2)
    found = answers(rule, model_drafter(padded), FEWER)
    check_law(found.texts)
    assert found.guesses("drafted")[-1] == FEWER  # no draft was dropped


class Replaying(Drafter):
    """Hands in every draft twice, the second time when the text has gone on."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._made: dict[int, Draft] = {}

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        fresh = self._drafter.propose(asks)
        return [
            self._made.pop(ask.request.request_id, None) or self._keep(ask, draft)
            for ask, draft in zip(asks, fresh, strict=True)
        ]

    def _keep(self, ask: DraftTask, draft: Draft) -> Draft:
        self._made[ask.request.request_id] = draft
        return draft

    def forget(self, request: DraftRequest) -> None:
        self._made.pop(request.request_id, None)
        self._drafter.forget(request)


@pytest.mark.parametrize("chain", [1, CHAIN])
@pytest.mark.parametrize("rule", DRAWING_RULES)
def test_a_draft_that_is_handed_in_again_is_not_judged_again(rule: str, chain: int):
    """What the text has become was decided with the same guesses; those that it has not passed are another matter."""
    found = answers(rule, Replaying(model_drafter(OTHER)), FEWER, chain=chain)
    check_law(found.texts)


def test_bad_words_are_seen_across_several_accepted_guesses():
    """Three tokens in a row may not come, wherever steps begin and end."""
    word = (1, 2, 2)
    guessed = answers("coupled", model_drafter(OTHER), 200, words=[word])
    assert guessed.guesses("accepted")[-1] > 20
    assert guessed.texts == answers("coupled", None, 200, words=[word]).texts
    assert all(word not in zip(text, text[1:], text[2:], strict=False) for text in guessed.texts)
    free = answers("coupled", model_drafter(OTHER), 200).texts
    assert any(word in zip(text, text[1:], text[2:], strict=False) for text in free)
