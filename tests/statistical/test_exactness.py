"""The proofs of `foreword prove`, as tests: the same functions, sizes that suit a test run."""

import numpy as np
import pytest

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.rules.rule import Rule
from foreword.proofs.cases import DraftKind, SmallDrafter
from foreword.proofs.coupled import pathwise_mismatches
from foreword.proofs.enumeration import (
    TreeDrafting,
    target_distribution,
    text_distribution,
    tree_step_distribution,
    tree_text_distribution,
    worst_deviation,
)
from foreword.proofs.statistics import (
    TREE,
    biased_distribution,
    chi_square,
    default_decoder,
    measure_power,
    sampled_counts,
    true_distribution,
)
from foreword.proofs.suite import (
    CHAIN_RULES,
    EXACT,
    PARAMETERS,
    QUICK,
    TREES,
    coupled_agreement,
    expected_accepted,
    run_suites,
    small_case,
)

KINDS_AND_PARAMETERS = [(DraftKind.DRAWN, name) for name in PARAMETERS] + [
    (kind, "temperature 1") for kind in DraftKind if kind is not DraftKind.DRAWN
]
"""All parameters with one kind of draft, all kinds with one set of parameters; the slow tests have all pairs."""


@pytest.mark.parametrize(("guessing", "parameters"), KINDS_AND_PARAMETERS)
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_chain_rules_keep_the_joint_law(rule: Rule, guessing: DraftKind, parameters: str):
    case = small_case(rule, PARAMETERS[parameters], target=3)
    for length in (1, 2):
        law = text_distribution(case, SmallDrafter(case, guessing), length)
        assert sum(law.values()) == pytest.approx(1, abs=EXACT)
        assert worst_deviation(law, target_distribution(case)) <= EXACT


@pytest.mark.parametrize("replaced", [False, True], ids=["without replacement", "with replacement"])
@pytest.mark.parametrize(("guessing", "parameters"), KINDS_AND_PARAMETERS)
def test_traversal_keeps_the_joint_law_of_siblings(guessing: DraftKind, parameters: str, replaced: bool):
    case = small_case(Rule.TRAVERSAL, PARAMETERS[parameters], target=3)
    law = tree_text_distribution(TreeDrafting(SmallDrafter(case, guessing), TREES["two siblings"], replaced))
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert worst_deviation(law, target_distribution(case)) <= EXACT


@pytest.mark.parametrize("replaced", [False, True], ids=["without replacement", "with replacement"])
@pytest.mark.parametrize("shape", list(TREES)[1:])
@pytest.mark.parametrize("guessing", [DraftKind.DRAWN, DraftKind.SPARSE, DraftKind.MIXED])
def test_traversal_keeps_the_joint_law_of_trees(guessing: DraftKind, shape: str, replaced: bool):
    case = small_case(Rule.TRAVERSAL, PARAMETERS["temperature 1"], target=5)
    law = tree_text_distribution(TreeDrafting(SmallDrafter(case, guessing), TREES[shape], replaced))
    assert worst_deviation(law, target_distribution(case)) <= EXACT


def test_the_enumeration_of_trees_sees_who_tells_the_wrong_kind_of_siblings():
    """Drawn without replacement and told as if with it, by as little as one sibling."""
    case = small_case(Rule.TRAVERSAL, SamplingParams(), target=3)

    class Lying(SmallDrafter):
        def next_tokens(self, history, without=()):
            told = {token: q for token, q, _ in super().next_tokens(history)}
            for token, _, chance in super().next_tokens(history, without):
                yield token, told[token], chance

    law = tree_text_distribution(TreeDrafting(Lying(case, DraftKind.DRAWN), TREES["two siblings"]))
    assert worst_deviation(law, target_distribution(case)) > 1e-3


@pytest.mark.parametrize("target", range(4))
def test_a_tree_accepts_more_than_its_first_chain(target: int):
    case = small_case(Rule.TRAVERSAL, SamplingParams(), target)
    model = SmallDrafter(case, DraftKind.DRAWN, 0.3)
    accepted = [
        sum((len(tokens) - 1) * chance for tokens, chance in law.items())
        for law in (
            tree_step_distribution(TreeDrafting(model, parents), case.prompt) for parents in ((-1, 0), TREE)
        )
    ]
    assert accepted[1] > accepted[0]


@pytest.mark.slow
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("guessing", list(DraftKind))
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_long_chains_keep_the_joint_law(rule: Rule, guessing: DraftKind, parameters: str):
    case = small_case(rule, PARAMETERS[parameters], target=4)
    for length in (3, 4):
        law = text_distribution(case, SmallDrafter(case, guessing), length)
        assert worst_deviation(law, target_distribution(case)) <= EXACT


def test_the_enumeration_sees_a_small_bias():
    """A proof that cannot fail proves nothing: a draft law that is told a little wrong must show."""
    case = small_case(Rule.TOKEN, SamplingParams(), target=3)
    honest, liar = (SmallDrafter(case, DraftKind.DRAWN, likeness) for likeness in (0.5, 0.5001))

    class Lying(SmallDrafter):
        def next_tokens(self, history, without=()):
            told = [q for _, q, _ in liar.next_tokens(history, without)]
            for (token, _, chance), q in zip(honest.next_tokens(history, without), told, strict=True):
                yield token, q, chance

    law = text_distribution(case, Lying(case, DraftKind.DRAWN), 2)
    assert worst_deviation(law, target_distribution(case)) > 100 * EXACT


@pytest.mark.parametrize("cases", [800, pytest.param(20_000, marks=pytest.mark.slow)])
def test_coupled_text_is_plain_text(cases: int):
    tried, accepted, wrong = pathwise_mismatches(cases, seed=99)
    assert wrong == 0
    assert accepted > tried


@pytest.mark.parametrize("target", range(4))
def test_block_accepts_no_less_than_token(target: int):
    found = {}
    for rule in CHAIN_RULES:
        case = small_case(rule, SamplingParams(), target)
        found[rule] = expected_accepted(case, SmallDrafter(case, DraftKind.DRAWN, 0.3), 3)
    assert found[Rule.BLOCK] >= found[Rule.TOKEN] - EXACT


def test_token_accepts_what_the_distributions_share():
    case = small_case(Rule.TOKEN, SamplingParams(), target=2)
    model = SmallDrafter(case, DraftKind.DRAWN, 0.3)
    p = np.array([target_distribution(case, 1)[(token,)] for token in range(3)])
    shared = np.minimum(p, model.probabilities(case.prompt)).sum()
    assert expected_accepted(case, model, 1) == pytest.approx(shared, abs=EXACT)


def test_coupled_keeps_its_bound():
    rng = np.random.default_rng(1)
    for seed in range(20):
        p, q = rng.dirichlet(np.ones(6), 2)
        found = coupled_agreement(p, q, 20_000, seed)
        assert found.agreed >= found.bound - 4.5 * found.error


@pytest.mark.parametrize("rule", list(Rule))
def test_the_step_samples_the_targets_law(rule: Rule):
    decoder = default_decoder()
    law = true_distribution(decoder)
    power = measure_power(law, 800, bias=0.056, runs=1_000, seed=3)
    assert power.caught >= 0.99
    assert chi_square(sampled_counts(decoder, rule, 800, seed=50_000), law) <= power.threshold


def test_a_bias_of_half_a_percent_is_caught():
    law = true_distribution(default_decoder())
    power = measure_power(law, 60_000, bias=0.005, runs=400, seed=4)
    assert np.abs(biased_distribution(law, 0.005) - law).sum() / 2 == pytest.approx(0.005)
    assert power.caught >= 0.95
    assert power.false_alarms <= 0.002


@pytest.mark.slow
@pytest.mark.parametrize("rule", list(Rule))
def test_the_step_samples_the_targets_law_within_half_a_percent(rule: Rule):
    decoder = default_decoder()
    law = true_distribution(decoder)
    power = measure_power(law, 60_000, bias=0.005, runs=400, seed=4)
    assert power.caught >= 0.95
    assert chi_square(sampled_counts(decoder, rule, 60_000, seed=10**6), law) <= power.threshold


@pytest.mark.slow
def test_the_quick_suite_holds():
    assert all(row.passed for row in run_suites(QUICK, lambda *_: None))
