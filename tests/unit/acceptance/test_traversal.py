"""*Traversal* against its scalar reference, noise and all, and against *block* on chains."""

from dataclasses import replace

import numpy as np
import pytest

from foreword.acceptance.judge import judge
from foreword.acceptance.noise import Stream
from foreword.acceptance.rules.rule import Rule
from foreword.proofs.cases import Case, DraftKind, SmallDrafter, random_case
from foreword.proofs.enumeration import PossibleTree
from foreword.speculation.draft import Draft
from helpers import rule_reference as reference
from helpers.judging import judgement
from helpers.rule_cases import logits_along, noise_key, random_chain, row_after


def random_tree(
    model: SmallDrafter, case: Case, done: list[int], rng: np.random.Generator, replaced: bool
) -> PossibleTree:
    """One of the trees that the model can draw in a random shape, as likely as it is."""
    tree = PossibleTree()
    for _ in range(int(rng.integers(1, 9))):
        parent = int(rng.integers(-1, len(tree.tokens)))
        siblings = [t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == parent]
        history = (*case.prompt, *done, *tree.path(parent))
        guesses = list(model.next_tokens(history, () if replaced else tuple(siblings)))
        if guesses:
            token, q, chance = guesses[rng.choice(len(guesses), p=[chance for *_, chance in guesses])]
            tree = tree.grown(token, parent, q, chance)
    return tree


def dense(tree: PossibleTree, vocab: int) -> list[list[float]]:
    """[nodes, vocab], what every node's token was drawn from."""
    rows = np.zeros((len(tree.tokens), vocab))
    for row, token, law in zip(rows, tree.tokens, tree.drawn, strict=True):
        row[[token] if law is None else law.ids] = 1.0 if law is None else law.probs
    return rows.tolist()


@pytest.mark.parametrize("replaced", [False, True], ids=["without replacement", "with replacement"])
@pytest.mark.parametrize("guessing", list(DraftKind))
def test_traversal_is_its_reference(guessing: DraftKind, replaced: bool):
    rng = np.random.default_rng(10)
    depths, younger = set(), 0
    for _ in range(30):
        case = random_case(rng, Rule.TRAVERSAL)
        model, done = SmallDrafter(case, guessing, 0.7), [int(rng.integers(6))]
        tree = random_tree(model, case, done, rng, replaced)
        request = case.sampler()
        request.commit(done)
        start = len(case.prompt) + len(done)
        levels = [len(tree.path(node)) - 1 for node in range(len(tree.tokens))]
        chance = []
        for node, level in enumerate(levels):
            branch = levels[:node].count(level)
            chance.append(reference.uniform(noise_key(case, Stream.ACCEPT, 1, start + level, branch)))
        p = [row_after(case, [*done, *tree.path(node)]) for node in range(-1, len(tree.tokens))]
        path, left = reference.traversal(p, dense(tree, len(p[0])), tree.tokens, tree.parents, chance)
        own = reference.draw(left, noise_key(case, Stream.RESIDUAL, 1, start + len(path)))
        draft = Draft(tree.tokens, tree.parents, drawn=tree.drawn)
        verdicts = judge(judgement(logits_along(case, done, draft), [draft], [request]))
        assert verdicts.paths[0] == path
        assert verdicts.target_tokens[0] == own
        depths.add(len(path))
        younger += any(tree.parents[node] in tree.parents[:node] for node in path)
    assert len(depths) > 2, "the cases are too much alike"
    assert younger or guessing not in (DraftKind.DRAWN, DraftKind.MIXED), (
        "none but first siblings were accepted"
    )


@pytest.mark.parametrize("guessing", list(DraftKind))
def test_traversal_is_block_on_chains(guessing: DraftKind):
    """The same verdicts by the same random numbers."""
    rng = np.random.default_rng(11)
    lengths = set()
    for _ in range(30):
        case = random_case(rng, Rule.BLOCK)
        tokens, drawn, *_ = random_chain(SmallDrafter(case, guessing, 0.7), case, [], rng)
        draft = Draft.chain(tokens, 0, drawn=drawn)
        logits = logits_along(case, [], draft)
        found = [
            judge(judgement(logits, [draft], [replace(case, rule=rule).sampler()]))
            for rule in (Rule.BLOCK, Rule.TRAVERSAL)
        ]
        assert found[0].paths[0] == found[1].paths[0]
        assert found[0].target_tokens == found[1].target_tokens
        lengths.add(len(found[0].paths[0]))
    assert len(lengths) > 2
