"""The rules against their scalar references, noise and all, and what they refuse."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreword.acceptance.batch import Verdicts
from foreword.acceptance.judge import judge
from foreword.acceptance.noise import Stream
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules import coupled
from foreword.acceptance.rules.rule import Rule
from foreword.acceptance.rules.trees import DraftTrees, Drawn
from foreword.errors import RequestError
from foreword.proofs.cases import Case, DraftKind, SmallDrafter, random_case
from foreword.proofs.coupled import likely_tree
from foreword.speculation.draft import Draft
from helpers import rule_reference as reference
from helpers.judging import PLAIN, judgement, sampler
from helpers.rule_cases import logits_along, noise_key, random_chain, row_after


def test_coupled_is_its_reference():
    rng = np.random.default_rng(8)
    for _ in range(150):
        case = random_case(rng)
        tree = likely_tree(rng, case.limits.vocab_size, [])
        draft = Draft(tuple(tree.tokens), tuple(tree.parents))

        def next_token(path: list[int], case: Case = case) -> int:
            key = noise_key(case, Stream.TARGET, 0, len(case.prompt) + len(path))
            return reference.draw(row_after(case, path), key)

        expected = reference.coupled(next_token, tree.tokens, tree.parents)
        verdicts = judge(judgement(logits_along(case, [], draft), [draft], [case.sampler()]))
        path = [tree.tokens[node] for node in verdicts.paths[0]]
        assert path == [tree.tokens[node] for node in expected[0]]
        assert verdicts.target_tokens[0] == expected[1]


def test_coupled_goes_down_chains_and_trees_as_far_as_they_were_drawn():
    rng = random.Random(5)
    for _ in range(60):
        sizes = [rng.randrange(7) for _ in range(4)]
        parents = [
            [node - 1 if request % 2 else rng.randrange(-1, node) for node in range(size)]
            for request, size in enumerate(sizes)
        ]
        tokens = [[rng.randrange(2) for _ in range(size)] for size in sizes]
        trees = DraftTrees.stack(tokens, parents)
        draws = [rng.randrange(2) for _ in trees.token_list]
        found = Verdicts.at(trees, coupled.stop_rows(trees, draws), draws[:4], [0] * 4)
        for request, root in enumerate(trees.starts[:-1]):
            ways = [trees.path_to(row) for row in range(root, trees.starts[request + 1])]
            drawn = [
                way
                for way in ways
                if all(trees.token_list[row] == draws[trees.parent_list[row]] for row in way)
            ]
            deepest = max(drawn, key=len)  # the first of equals
            assert found.paths[request] == [row - root - 1 for row in deepest]


@pytest.mark.parametrize("guessing", list(DraftKind))
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_chain_rules_are_their_references(rule: Rule, guessing: DraftKind):
    rng = np.random.default_rng(9)
    lengths = set()
    for _ in range(40):
        case = random_case(rng, rule)
        model, done, steps = (
            SmallDrafter(case, guessing, 0.7),
            [int(rng.integers(6))],
            int(rng.integers(1, 4)),
        )
        request = case.sampler()
        for _ in range(steps - 1):
            request.commit([])
        request.commit(done)
        tokens, drawn, q, p = random_chain(model, case, done, rng)
        draft = Draft.chain(tokens, 0)
        draft = Draft(draft.tokens, draft.parents, drawn=drawn)
        start = len(case.prompt) + len(done)
        chance = [
            reference.uniform(noise_key(case, Stream.ACCEPT, steps, start + i)) for i in range(len(tokens))
        ]
        if rule is Rule.TOKEN:
            count, scale = reference.token_stop(reference.token_acceptance(p, q, tokens), chance), 1.0
        else:
            accept, carried = reference.block_acceptance(p, q, tokens)
            count = reference.block_stop(accept, chance)
            scale = carried[count]
        left = reference.residual(p[count], q[count], scale) if count < len(tokens) else p[count]
        own = reference.draw(left, noise_key(case, Stream.RESIDUAL, steps, start + count))
        verdicts = judge(judgement(logits_along(case, done, draft), [draft], [request]))
        assert verdicts.paths[0] == list(range(count))
        assert verdicts.target_tokens[0] == own
        lengths.add(count)
    assert len(lengths) > 2, "the cases are too much alike"


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_a_tree_is_refused_by_the_chain_rules(rule: Rule):
    tree = Draft((1, 2), (-1, -1))
    judged = judgement(torch.zeros(3, 9), [tree], [sampler(SamplingParams(), 9, rule=rule)])
    with pytest.raises(RequestError, match=f"{rule.name.lower()}.*chains only"):
        judge(judged)


def test_an_unknown_rule_is_refused_by_name():
    with pytest.raises(RequestError, match="typical"):
        Rule.parse("typical")


@pytest.mark.parametrize("rule", list(Rule))
def test_greedy_is_every_rules_limit(rule: Rule):
    generator = torch.Generator().manual_seed(4)
    for _ in range(50):
        logits = torch.randn(5, 12, generator=generator).round(decimals=1)
        best = logits.argmax(-1).tolist()
        guesses = [best[i] if torch.rand(1, generator=generator) < 0.8 else 3 for i in range(4)]
        judged = judgement(
            logits, [Draft.chain(guesses, 0)], [sampler(SamplingParams(temperature=0), 12, rule=rule)]
        )
        right = next((i for i in range(4) if guesses[i] != best[i]), 4)
        verdicts = judge(judged)
        assert verdicts.paths[0] == list(range(right))
        assert verdicts.target_tokens[0] == best[right]


@pytest.mark.parametrize("rule", list(Rule))
def test_a_guess_outside_the_vocabulary_is_never_accepted(rule: Rule):
    logits = torch.zeros(4, 16)
    logits[:, 10:] = 30.0  # padding
    for seed in range(100):
        params = SamplingParams(seed=seed)
        verdicts = judge(judgement(logits, [Draft.chain([12, 12, 1], 0)], [sampler(params, 10, rule=rule)]))
        assert verdicts.paths[0] == []
        assert 0 <= verdicts.target_tokens[0] < 10


def test_rules_and_shapes_share_a_batch():
    rng = np.random.default_rng(12)
    cases = [random_case(rng, Rule(i % 4)) for i in range(40)]
    drafts = []
    for case in cases:
        tokens = [int(t) for t in rng.integers(0, case.limits.vocab_size, rng.integers(0, 5))]
        parents = [
            int(rng.integers(-1, node)) if case.rule.takes_trees else node - 1 for node in range(len(tokens))
        ]
        drafts.append(Draft(tuple(tokens), tuple(parents)))
    alone = []
    for case, draft in zip(cases, drafts, strict=True):
        found = judge(judgement(logits_along(case, [], draft), [draft], [case.sampler()]))
        alone.append((found.paths[0], int(found.target_tokens[0])))
    widest = max(case.limits.vocab_size for case in cases)
    rows = [
        torch.nn.functional.pad(logits, (0, widest - logits.shape[1]), value=-torch.inf)
        for logits in (logits_along(c, [], d) for c, d in zip(cases, drafts, strict=True))
    ]
    together = judge(judgement(torch.cat(rows), drafts, [case.sampler() for case in cases]))
    assert [(together.paths[i], int(together.target_tokens[i])) for i in range(40)] == alone


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bad_row", range(4))
def test_a_failing_row_keeps_the_tokens_accepted_before_it(rule: Rule, poison: float, bad_row: int):
    logits = torch.full((4, 9), -1.0)
    truth = [5, 6, 7, 8]
    for row, token in enumerate(truth):
        logits[row, token] = 9.0
    logits[bad_row, 0 if poison == float("inf") else slice(None)] = poison
    guesses = [0 if row == bad_row else token for row, token in enumerate(truth[:3])]
    for draft in (Draft.chain(truth[:3], 1), Draft.chain(guesses, 1)):
        judged = judgement(logits, [draft], [sampler(SamplingParams(temperature=0), 9, rule=rule)])
        verdicts = judge(judged)
        assert verdicts.error(0) is not None
        assert verdicts.paths[0] == list(range(bad_row))
        assert verdicts.tokens(judged.trees, 0) == truth[:bad_row]


def test_the_deepest_of_equal_siblings_is_followed():
    logits = torch.full((4, 9), 0.0)
    logits[0, 5] = logits[2, 6] = logits[1, 6] = 9.0
    draft = Draft((5, 5, 6), (-1, -1, 1))
    verdicts = judge(judgement(logits, [draft], [sampler(SamplingParams(temperature=0), 9)]))
    assert verdicts.paths[0] == [1, 2]


@pytest.mark.parametrize("rule", list(Rule))
def test_seed_and_sample_decide_and_nothing_else_does(rule: Rule):
    logits = torch.zeros(1, 1000)

    def own(seed: int, sample: int) -> int:
        request = RequestSampler(SamplingParams(), TokenLimits(1000), [1], seed, sample=sample, rule=rule)
        return int(judge(judgement(logits, [PLAIN], [request])).target_tokens[0])

    drawn = {(seed, sample): own(seed, sample) for seed in range(12) for sample in range(4)}
    assert len(set(drawn.values())) > 40
    assert all(own(*name) == token for name, token in drawn.items())


@pytest.mark.parametrize(
    ("ids", "probs"),
    [([1, 1], [0.5, 0.5]), ([1, 2], [0.5, 0.6]), ([1], [np.nan]), ([1, 2], [-0.5, 1.5]), ([-1], [1.0])],
)
def test_a_q_that_is_no_distribution_is_an_error(ids: list[int], probs: list[float]):
    with pytest.raises(ValueError, match="q"):
        Drawn(np.array(ids), np.array(probs))


def test_a_q_that_cannot_draw_its_token_is_an_error():
    with pytest.raises(ValueError, match="cannot be drawn"):
        Draft((4,), (-1,), drawn=(Drawn(np.array([1, 2]), np.array([0.5, 0.5])),))


def test_q_cannot_be_changed_behind_its_token():
    q = Drawn(np.array([2, 1]), np.array([0.25, 0.75]))
    with pytest.raises(ValueError, match="read-only"):
        q.probs[0] = 0.0
    assert q.prob(1) == 0.75


@pytest.mark.parametrize("rule", list(Rule))
def test_what_the_target_draws_is_told_under_every_rule(rule: Rule):
    """Where a drafter asks for it; it is what *coupled* draws, and decides nothing else."""
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    draft = Draft.chain([3, 4, 5], 0)
    params = SamplingParams(seed=5)
    expected = judge(replace(judgement(logits, [draft], [sampler(params, 30)]), wants_draws=True)).draws
    assert min(expected) >= 0  # after every row, whatever was accepted
    silent = judgement(logits, [draft], [sampler(params, 30, rule=rule)])
    asked = replace(silent, wants_draws=True)
    assert judge(asked).draws == expected
    assert (judge(asked).paths, judge(asked).target_tokens) == (
        judge(silent).paths,
        judge(silent).target_tokens,
    )
