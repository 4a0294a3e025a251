"""Proves *token*, *block* and *traversal* by enumerating every random outcome of several steps.

For a small vocabulary, the production functions give the probability of every draft, of every pattern of accepted nodes
and of every target token. The joint distribution of the first tokens must equal the target's.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from foreword.acceptance.batch import Judgement
from foreword.acceptance.distribution import KeptTokens, distributions
from foreword.acceptance.reference import probabilities
from foreword.acceptance.rules import block, token, traversal
from foreword.acceptance.rules.chains import AcceptancePlan, ChainRows, leftover_weights
from foreword.acceptance.rules.rule import Rule
from foreword.acceptance.rules.trees import DraftTrees, Floats
from foreword.proofs.cases import Case, PossibleTree, SmallDrafter, Tokens, target_logits

Distribution = dict[Tokens, float]  # probabilities of token sequences
POSITIONS = 3  # number of positions of the joint distribution


@dataclass(frozen=True)
class TreeDrafting:
    """How trees are drafted."""

    model: SmallDrafter
    parents: tuple[int, ...]  # parent of each node; -1 on the first level
    replaced: bool = False  # whether siblings are drawn with replacement


def possible_trees(drafting: TreeDrafting, history: Tokens) -> Iterator[PossibleTree]:
    """Yield every tree that can be drafted after a history."""

    def grow(tree: PossibleTree, numbers: tuple[int | None, ...]) -> Iterator[PossibleTree]:
        """Extend a tree by the next node of the shape; `numbers` maps the shape's nodes to the tree's, or to None."""
        if len(numbers) == len(drafting.parents):
            yield tree
            return
        parent_in_shape = drafting.parents[len(numbers)]
        parent = -1 if parent_in_shape < 0 else numbers[parent_in_shape]
        if parent is None:  # the shape's parent could not be drafted
            yield from grow(tree, (*numbers, None))
            return
        siblings = (token for token, above in zip(tree.tokens, tree.parents, strict=True) if above == parent)
        excluded = () if drafting.replaced else tuple(siblings)
        choices = list(drafting.model.next_tokens((*history, *tree.path(parent)), excluded))
        for drafted, q, chance in choices:
            yield from grow(tree.grown(drafted, parent, q, chance), (*numbers, len(tree.tokens)))
        if not choices:
            yield from grow(tree, (*numbers, None))

    yield from grow(PossibleTree(), ())


def judged_rows(case: Case, drafts: Sequence[PossibleTree], history: Tokens) -> ChainRows:
    """Return the rows of one pass over all drafts after a history (prompt included)."""
    sampler = case.sampler()
    sampler.commit(history[len(case.prompt) :])
    histories = [[(*history, *draft.path(node)) for node in range(-1, len(draft.tokens))] for draft in drafts]
    logits = target_logits([case] * len(drafts), histories)
    trees = DraftTrees.stack(
        [d.tokens for d in drafts], [d.parents for d in drafts], [d.drawn for d in drafts]
    )
    judged = Judgement.of(logits, trees, [sampler] * len(drafts))
    return ChainRows.of(distributions(judged), trees, np.arange(len(trees.tokens)))


def step_distribution(case: Case, draft: SmallDrafter, history: Tokens, length: int) -> Distribution:
    """Return the distribution of the tokens that one step commits after a history, with chains of this length.

    It is a sum over all possible chains, all patterns of accepted nodes, and all tokens that the target may add.
    """
    chains = list(possible_trees(TreeDrafting(draft, tuple(range(-1, length - 1))), history))
    rows = judged_rows(case, chains, history)
    trees, rule = rows.trees, token if case.rule is Rule.TOKEN else block
    plan = rule.plan(rows, np.flatnonzero(trees.depths > 0))
    likely = np.array([chain.probability for chain in chains])
    distribution: Distribution = defaultdict(float)
    for pattern in product((True, False), repeat=length):
        weight, chance = outcome_of_pattern(trees, plan, np.array(pattern, np.bool_))
        kept = leftover_weights(rows, plan, rule.stop_rows(trees, plan.accept, chance))
        weights, chain_of = kept.log_weights.exp().numpy(), trees.request_of_row[kept.rows.numpy()]
        shares = weights / np.bincount(chain_of, weights, len(chains))[chain_of]
        _add_outcomes(distribution, trees, kept, shares, likely * weight)
    return distribution


def outcome_of_pattern(trees: DraftTrees, plan: AcceptancePlan, pattern: np.ndarray) -> tuple[Floats, Floats]:
    """Return the probability that exactly the pattern's nodes are accepted, [chains].

    Also return random numbers [rows] with which they are: a node is accepted if its number is below `plan.accept`.
    """
    wanted = np.concatenate([[True], pattern])[trees.depths]
    chance = np.where(wanted, plan.accept / 2, (plan.accept + 1) / 2)
    weight = np.where(wanted, plan.accept, 1 - plan.accept)
    weight[trees.depths == 0] = 1.0
    per_chain: Floats = np.multiply.reduceat(weight, trees.roots)
    return per_chain, chance


def _add_outcomes(
    distribution: Distribution, trees: DraftTrees, kept: KeptTokens, shares: Floats, likely: Floats
) -> None:
    """Add to the distribution each draft's accepted path followed by each token that the target may add.

    `shares` are the probabilities of the target's tokens (`kept`), `likely` those of the drafts with this outcome.
    """
    for row, target_token, share in zip(kept.rows.tolist(), kept.ids.tolist(), shares.tolist(), strict=True):
        weight = likely[trees.request_of_row[row]]
        if weight > 0:
            accepted = [trees.token_list[node] for node in trees.path_to(row)]
            distribution[(*accepted, target_token)] += float(weight * share)


def text_distribution(case: Case, draft: SmallDrafter, length: int) -> Distribution:
    """Return the joint distribution of the first tokens after the prompt, over several steps with chains."""
    return joint_distribution(lambda history: step_distribution(case, draft, history, length), case.prompt)


def joint_distribution(
    step: Callable[[Tokens], Distribution], prompt: Tokens, positions: int = POSITIONS
) -> Distribution:
    """Return the joint distribution of the first tokens; `step` returns that of one step after a history."""
    step = cache(step)

    def after(history: Tokens, left: int) -> Distribution:
        distribution: Distribution = defaultdict(float)
        for committed, chance in step(history).items():
            if len(committed) >= left:
                distribution[committed[:left]] += chance
                continue
            for later, share in after((*history, *committed), left - len(committed)).items():
                distribution[(*committed, *later)] += chance * share
        return distribution

    return after(prompt, positions)


def target_distribution(case: Case, positions: int = POSITIONS) -> Distribution:
    """Return the target's joint distribution, from the slow reference."""
    distribution: Distribution = {(): 1.0}
    for _ in range(positions):
        longer: Distribution = {}
        for tokens, chance in distribution.items():
            logits = target_logits([case], [[(*case.prompt, *tokens)]])[0].tolist()
            row = probabilities(logits, case.params, case.limits, case.prompt, tokens, case.allowed(tokens))
            longer |= {(*tokens, v): chance * p for v, p in enumerate(row) if p > 0}
        distribution = longer
    return distribution


def worst_deviation(distribution: Mapping[Tokens, float], other: Mapping[Tokens, float]) -> float:
    """Return the largest difference of two distributions."""
    return max(abs(distribution.get(text, 0.0) - other.get(text, 0.0)) for text in {*distribution, *other})


def tree_step_distribution(drafting: TreeDrafting, history: Tokens) -> Distribution:
    """Return the distribution of one step's tokens after a history (prompt included)."""
    drafts = list(possible_trees(drafting, history))
    rows, requests = judged_rows(drafting.model.case, drafts, history), np.arange(len(drafts))
    plan = traversal.plan(rows, requests)
    likely = np.array([draft.probability for draft in drafts])
    distribution: Distribution = defaultdict(float)
    for turn in range(len(drafting.parents) + 1):
        weight, chance = outcome_of_turn(rows.trees, plan.accept, turn)
        stops = traversal.stop_rows(rows.trees, requests, plan.accept, chance)
        kept = traversal.leftover_weights(rows, plan, stops)
        _add_outcomes(distribution, rows.trees, kept, kept.log_weights.exp().numpy(), likely * weight)
    return distribution


def outcome_of_turn(trees: DraftTrees, accept: Floats, turn: int) -> tuple[Floats, Floats]:
    """Return for each tree the probability that the node of this turn is the first accepted one, [trees].

    Also return random numbers [rows] with which it is. A turn is an index into the order in which nodes are visited.
    """
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


def tree_text_distribution(drafting: TreeDrafting) -> Distribution:
    """Return the joint distribution of the first tokens after the prompt, over several steps with trees."""
    return joint_distribution(
        lambda history: tree_step_distribution(drafting, history), drafting.model.case.prompt
    )
