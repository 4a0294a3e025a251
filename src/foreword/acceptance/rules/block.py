"""Block verification (Sun et al. 2024, arXiv 2403.10444), for chains.

w_i = min(1, w_{i-1} p(x_i) / q(x_i)), with w_0 = 1, is the share of the target's probability that the first i tokens
carry. Each prefix is tested with a random number of its own, and the longest prefix that passes is accepted. It may
contain a token that the *token* rule would reject. In expectation *block* accepts at least as many tokens as *token*.
"""

import numpy as np

from foreword.acceptance.rules.chains import AcceptancePlan, ChainRows, next_in_chain, ratios
from foreword.acceptance.rules.trees import NO_ROW, DraftTrees, Floats, Ints


def plan(chains: ChainRows, nodes: Ints) -> AcceptancePlan:
    """Return the acceptance probability of the prefix that ends at each node; `nodes` are the chains' draft rows."""
    carried = carried_weights(chains, nodes)
    is_last = next_in_chain(chains.trees, nodes) == NO_ROW
    accept = np.zeros_like(carried)
    # The whole chain is accepted with probability w. A shorter prefix is accepted with r / (r + 1 - w), where r is the
    # mass of the residual after it.
    accept[nodes[is_last]] = carried[nodes[is_last]]
    inner = nodes[~is_last]
    residual = residual_mass(chains, nodes, carried)[inner]
    total = residual + 1 - carried[inner]
    accept[inner] = np.divide(residual, total, out=np.zeros_like(residual), where=total > 0)
    return AcceptancePlan(accept, carried)


def carried_weights(chains: ChainRows, nodes: Ints) -> Floats:
    """Return w of every row, [all rows]; 1 at roots."""
    depths, ratio = chains.trees.depths, ratios(chains, nodes)
    carried = np.ones(len(depths))
    for depth in range(1, int(depths[nodes].max(initial=0)) + 1):
        level = nodes[depths[nodes] == depth]
        carried[level] = np.minimum(1.0, carried[level - 1] * ratio[level])
    return carried


def residual_mass(chains: ChainRows, nodes: Ints, carried: Floats) -> Floats:
    """Return, for every row, the sum of max(w p - q, 0) over the tokens that can follow it, [all rows].

    Since p sums to 1, this is w minus the sum of min(w p, q), which only needs the support of q.
    """
    q = chains.trees.q
    is_in_nodes = np.isin(q.rows, nodes)
    parents = q.rows[is_in_nodes] - 1  # in a chain, the row before
    overlap = np.minimum(carried[parents] * chains.target(parents, q.ids[is_in_nodes]), q.probs[is_in_nodes])
    return np.maximum(carried - np.bincount(parents, overlap, len(carried)), 0.0)


def stop_rows(trees: DraftTrees, accept: Floats, uniforms: Floats) -> Ints:
    """Return the last row of each request's longest accepted prefix, [requests].

    `uniforms` has one random number per row of the batch.
    """
    return trees.deepest((uniforms < accept) | (trees.depths == 0))
