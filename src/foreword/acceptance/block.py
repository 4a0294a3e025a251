"""Block verification (Sun et al. 2024, arXiv 2403.10444), for chains.

The whole chain is judged at once: w_i = min(1, w_{i-1} p(x_i) / q(x_i)) is how much of the target's probability the
first i tokens can carry. Each prefix is accepted by a uniform of its own and the longest accepted one wins, so a
token that token-by-token rejection refuses can be saved by the tokens behind it. Never fewer tokens in expectation.
"""

from dataclasses import dataclass

import numpy as np

from foreword.acceptance.chains import ChainRows, Leftover
from foreword.acceptance.token import next_in_chain
from foreword.acceptance.trees import NO_ROW, DraftTrees, Floats, Ints


@dataclass(frozen=True)
class BlockPlan:
    """What is known before the uniforms are."""

    accept: Floats  # [all rows], the probability with which the prefix up to this node is accepted
    carried: Floats  # [all rows], w of the prefix up to this row; 1 at roots


def plan(chains: ChainRows, nodes: Ints) -> BlockPlan:
    """Acceptance probabilities of all prefixes; nodes are the draft rows of the chains, no roots."""
    carried = carried_weights(chains, nodes)
    behind = next_in_chain(chains.trees, nodes)
    inner = behind != NO_ROW
    spare = spare_mass(chains, nodes, carried)
    accept = np.zeros_like(carried)
    accept[nodes[~inner]] = carried[nodes[~inner]]
    some = nodes[inner]
    left = spare[some]
    refused = left + 1 - carried[some]
    accept[some] = np.divide(left, refused, out=np.zeros_like(left), where=refused > 0)
    return BlockPlan(accept, carried)


def carried_weights(chains: ChainRows, nodes: Ints) -> Floats:
    """[all rows], w of every row, one level of all chains at a time."""
    trees = chains.trees
    p, q = chains.target(nodes - 1, trees.tokens[nodes]), trees.q.at(nodes, trees.tokens[nodes])
    ratio = np.zeros(len(trees.tokens))
    ratio[nodes] = np.divide(p, q, out=np.zeros_like(p), where=q > 0)
    carried = np.ones(len(trees.tokens))
    for depth in range(1, int(trees.depths[nodes].max(initial=0)) + 1):
        level = nodes[trees.depths[nodes] == depth]
        carried[level] = np.minimum(1.0, carried[level - 1] * ratio[level])
    return carried


def spare_mass(chains: ChainRows, nodes: Ints, carried: Floats) -> Floats:
    """[all rows], the sum of max(w p - q, 0) over the tokens that can follow the row.

    As p sums to 1 this is w minus the sum of min(w p, q), which only tokens in the support of q add to.
    """
    q = chains.trees.q
    mine = np.isin(q.rows, nodes)
    before = q.rows[mine] - 1
    common = np.minimum(carried[before] * chains.target(before, q.ids[mine]), q.probs[mine])
    shared = np.bincount(before, common, len(carried))
    return np.maximum(carried - shared, 0.0)


def stop_rows(trees: DraftTrees, accept: Floats, uniforms: Floats) -> Ints:
    """[requests], the last row of the longest accepted prefix; uniforms are per row."""
    return trees.deepest((uniforms < accept) | (trees.depths == 0))


def leftover(trees: DraftTrees, block: BlockPlan, stops: Ints) -> Leftover:
    """What the own tokens come from: the carried share of p less q, or the target itself behind the last node."""
    next_rows = next_in_chain(trees, stops)
    return Leftover(stops, np.where(next_rows == NO_ROW, 1.0, block.carried[stops]), next_rows)
