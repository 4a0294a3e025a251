"""*Traversal*: every tree that a drafter can draw, every node at which it can stop, every own token."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from foreword.acceptance.batch import Judgement
from foreword.acceptance.pipeline.distribution import distributions
from foreword.acceptance.rules import traversal
from foreword.acceptance.rules.chains import ChainRows
from foreword.acceptance.rules.drawn import Drawn, Floats, Ints
from foreword.acceptance.rules.trees import DraftTrees
from foreword.proofs.cases import target_logits
from foreword.proofs.draft_models import DraftModel
from foreword.proofs.enumeration import POSITIONS, Law, Tokens, joint_law


@dataclass(frozen=True)
class TreeDrafting:
    """How trees are drawn: from what, in which shape, and whether a sibling may be guessed twice."""

    model: DraftModel
    parents: tuple[int, ...]  # of the nodes, -1 for those of the first level
    replaced: bool = False


@dataclass(frozen=True)
class PossibleTree:
    """One draft that could happen, and how likely it is; where q has too few tokens it has fewer nodes."""

    tokens: Tokens = ()
    parents: tuple[int, ...] = ()
    drawn: tuple[Drawn | None, ...] = ()
    probability: float = 1.0

    def path(self, node: int) -> Tokens:
        """The tokens from the first level down to a node."""
        return () if node < 0 else (*self.path(self.parents[node]), self.tokens[node])

    def grown(self, token: int, parent: int, q: Drawn | None, chance: float) -> "PossibleTree":
        return PossibleTree(
            (*self.tokens, token), (*self.parents, parent), (*self.drawn, q), self.probability * chance
        )


def possible_trees(drafting: TreeDrafting, history: Tokens) -> Iterator[PossibleTree]:
    """Every tree that can be drawn after a history."""

    def grow(tree: PossibleTree, numbers: tuple[int | None, ...]) -> Iterator[PossibleTree]:
        """`numbers` are the nodes that the shape's places so far have become; None: there is none."""
        if len(numbers) == len(drafting.parents):
            yield tree
            return
        place = drafting.parents[len(numbers)]
        parent = -1 if place < 0 else numbers[place]
        if parent is None:
            yield from grow(tree, (*numbers, None))
            return
        siblings = [t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == parent]
        without = () if drafting.replaced else tuple(siblings)
        guesses = list(drafting.model.guesses((*history, *tree.path(parent)), without))
        for token, q, chance in guesses:
            yield from grow(tree.grown(token, parent, q, chance), (*numbers, len(tree.tokens)))
        if not guesses:
            yield from grow(tree, (*numbers, None))

    yield from grow(PossibleTree(), ())


def tree_step_law(drafting: TreeDrafting, history: Tokens) -> Law:
    """The distribution of what one step commits after a history (prompt included)."""
    case, drafts = drafting.model.case, list(possible_trees(drafting, history))
    sampler = case.sampler()
    sampler.commit(history[len(case.prompt) :])
    histories = [[(*history, *draft.path(node)) for node in range(-1, len(draft.tokens))] for draft in drafts]
    logits = target_logits([case] * len(drafts), histories)
    trees = DraftTrees.stack(
        [d.tokens for d in drafts], [d.parents for d in drafts], [d.drawn for d in drafts]
    )
    judged = Judgement.of(logits, trees, [sampler] * len(drafts))
    rows = ChainRows.of(distributions(judged), trees, np.arange(len(trees.tokens)))
    requests = np.arange(len(drafts))
    plan = traversal.plan(rows, requests)
    likely = np.array([draft.probability for draft in drafts])
    law: Law = defaultdict(float)
    for turn in range(len(drafting.parents) + 1):
        weight, chance = outcome_of_turn(trees, plan.accept, turn)
        stops = traversal.stop_rows(trees, requests, plan.accept, chance)
        _add_outcomes(law, rows, plan, stops, likely * weight)
    return law


def outcome_of_turn(trees: DraftTrees, accept: Floats, turn: int) -> tuple[Floats, Floats]:
    """([trees], [rows]): how likely it is that all before the node of this turn are refused and it is accepted,
    and uniforms that do so. Those of later nodes would accept them."""
    weights, chance = [], accept / 2
    for request in range(len(trees.starts) - 1):
        order = traversal.visits(trees, request)
        if turn >= len(order):
            weights.append(0.0)
            continue
        before = order[:turn]
        chance[before] = (accept[before] + 1) / 2
        last = 1.0 if order[turn] == trees.starts[request] else accept[order[turn]]
        weights.append(float(np.prod(1 - accept[before]) * last))
    return np.array(weights), chance


def _add_outcomes(
    law: Law, rows: ChainRows, plan: traversal.TraversalPlan, stops: Ints, likely: Floats
) -> None:
    """Add every own token after every tree's accepted path, where that can happen at all."""
    trees = rows.trees
    kept = traversal.leftover_weights(rows, plan, stops)
    shares = kept.log_weights.exp().tolist()
    for row, own, share in zip(kept.rows.tolist(), kept.ids.tolist(), shares, strict=True):
        weight = likely[trees.request_of_row[row]]
        if weight > 0:
            accepted = [trees.token_list[node] for node in trees.path_to(row)]
            law[(*accepted, own)] += float(weight * share)


def tree_text_law(drafting: TreeDrafting, positions: int = POSITIONS) -> Law:
    """The joint distribution of the first tokens after the prompt, over as many steps as they take."""
    return joint_law(lambda history: tree_step_law(drafting, history), drafting.model.case.prompt, positions)
