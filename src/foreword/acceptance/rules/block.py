"""Block verification (Sun et al.

2024, arXiv 2403.10444), for chains. The chain is judged as a whole: w_i = min(1, w_{i-1} p(x_i) / q(x_i)) is the
share of the target's probability that the first i tokens carry. Each prefix has its own uniform, and the longest
accepted prefix wins. So later tokens can save a token that *token* rejects. In expectation it never accepts fewer
tokens.
"""

import numpy as np

from foreword.acceptance.rules.chains import AcceptancePlan, ChainRows, next_in_chain, ratios
from foreword.acceptance.rules.trees import NO_ROW, DraftTrees, Floats, Ints


def plan(chains: ChainRows, nodes: Ints) -> AcceptancePlan:
    """Return acceptance probabilities of all prefixes; `nodes` are the chains' draft rows."""
    carried = carried_weights(chains, nodes)
    last = next_in_chain(chains.trees, nodes) == NO_ROW
    accept = np.zeros_like(carried)
    accept[nodes[last]] = carried[nodes[last]]
    inner = nodes[~last]
    spare = spare_mass(chains, nodes, carried)[inner]
    whole = spare + 1 - carried[inner]
    accept[inner] = np.divide(spare, whole, out=np.zeros_like(spare), where=whole > 0)
    return AcceptancePlan(accept, carried)


def carried_weights(chains: ChainRows, nodes: Ints) -> Floats:
    """Return w of every row, [all rows]; 1 at roots. It is computed level by level."""
    depths, ratio = chains.trees.depths, ratios(chains, nodes)
    carried = np.ones(len(depths))
    for depth in range(1, int(depths[nodes].max(initial=0)) + 1):
        level = nodes[depths[nodes] == depth]
        carried[level] = np.minimum(1.0, carried[level - 1] * ratio[level])
    return carried


def spare_mass(chains: ChainRows, nodes: Ints, carried: Floats) -> Floats:
    """Return for every row the sum of max(w p - q, 0) over the tokens that can follow it.

    Since p sums to 1, this is w minus the sum of min(w p, q), which only needs the support of q.
    """
    q = chains.trees.q
    is_in_nodes = np.isin(q.rows, nodes)
    before = q.rows[is_in_nodes] - 1
    common = np.minimum(carried[before] * chains.target(before, q.ids[is_in_nodes]), q.probs[is_in_nodes])
    shared = np.bincount(before, common, len(carried))
    return np.maximum(carried - shared, 0.0)


def stop_rows(trees: DraftTrees, accept: Floats, uniforms: Floats) -> Ints:
    """Return the last row of each request's longest accepted prefix, [requests]; `uniforms` has one per row."""
    return trees.deepest((uniforms < accept) | (trees.depths == 0))
