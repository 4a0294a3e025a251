"""The law of masked speculative decoding is that of masked plain decoding, for every rule and for trees."""

import numpy as np
import pytest

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.proofs.cases import Case, DraftKind, SmallDrafter, letter_grammars
from foreword.proofs.coupled import likely_tree, plain_texts, step_batch
from foreword.proofs.enumeration import (
    TreeDrafting,
    target_distribution,
    text_distribution,
    tree_text_distribution,
    worst_deviation,
)
from foreword.proofs.suite import CHAIN_RULES, EXACT, TREES
from foreword.structured.params import StructuredOutputs
from foreword.structured.state import GrammarError, GrammarState

FORMS = {
    "branching": "(ab|b)*a?b?",  # whether b may follow a depends on what follows it
    "forced": "a(ba)+|bb",  # mostly no choice at all
    "ending": "a?b?",  # complete early: the end, and behind it nothing else
}
LIMITS = TokenLimits(3, (0,))


def case(form: str, rule: Rule, seed: int = 0, **params) -> Case:
    chosen = SamplingParams(structured=StructuredOutputs(regex=FORMS[form]), **params)
    return Case(chosen, LIMITS, (1, 2), seed, 1000 + seed, rule=rule, spread=1.0)


def check(law, expected) -> None:
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert worst_deviation(law, expected) <= EXACT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("guessing", list(DraftKind))
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_chain_rules_keep_the_joint_law(rule: Rule, guessing: DraftKind, form: str):
    one = case(form, rule, seed=3)
    for length in (1, 2):
        check(text_distribution(one, SmallDrafter(one, guessing), length), target_distribution(one))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", ["two siblings", "two chains"])
@pytest.mark.parametrize("guessing", [DraftKind.DRAWN, DraftKind.SPARSE, DraftKind.MIXED])
def test_traversal_keeps_the_joint_law(guessing: DraftKind, shape: str, form: str):
    one = case(form, Rule.TRAVERSAL, seed=5)
    check(
        tree_text_distribution(TreeDrafting(SmallDrafter(one, guessing), TREES[shape])),
        target_distribution(one),
    )


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_other_parameters_hold_beside_a_grammar(rule: Rule):
    for params in ({"top_p": 0.7}, {"logit_bias": {0: 2.0, 1: -1.0}}, {"repetition_penalty": 1.5}):
        one = case("branching", rule, seed=2, temperature=0.8, **params)
        check(text_distribution(one, SmallDrafter(one, DraftKind.DRAWN), 2), target_distribution(one))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_coupled_gives_the_text_of_plain_decoding(temperature: float):
    """For any tree of guesses, allowed or not."""
    rng = np.random.default_rng(4)
    accepted = 0
    for form in FORMS:
        cases = [case(form, Rule.COUPLED, seed, temperature=temperature) for seed in range(60)]
        texts = [list(one.prompt) for one in cases]
        truths = [text[2:] for text in plain_texts(cases, 4)]
        drafts = [likely_tree(rng, 3, truth) for truth in truths]
        for truth, tokens in zip(truths, step_batch(cases, texts, drafts), strict=True):
            assert tokens[: len(truth)] == truth[: len(tokens)]
            accepted += len(tokens) - 1
    assert accepted > 50


def test_the_enumeration_sees_a_mask_of_the_wrong_node(monkeypatch):
    """That of the text instead of the node's own history."""
    right = GrammarState.masks

    def wrong(self, tokens, parents):
        return np.repeat(right(self, (), ()), 1 + len(tokens), axis=0)

    one = case("branching", Rule.TOKEN, seed=3)
    monkeypatch.setattr(GrammarState, "masks", wrong)
    with pytest.raises(GrammarError):  # what it commits could not have come
        text_distribution(one, SmallDrafter(one, DraftKind.DRAWN), 2)


def test_a_pause_of_the_machine_ends_no_request_of_a_proof():
    """Masks have a limit of CPU time, which a garbage collection in a large process can exceed."""
    clock = letter_grammars(LIMITS).clock
    assert {clock() for _ in range(3)} == {0.0}
