"""Token-by-token rejection sampling (Leviathan et al. 2023, Chen et al. 2023), for chains.

A token x sampled from q is accepted with probability min(1, p(x) / q(x)). At the first rejection the target's own token
is sampled from max(p - q, 0), normalised; if all nodes are accepted, from p. A position is accepted with probability
1 - TV(p, q), where TV is the total variation distance.
"""

import numpy as np

from foreword.acceptance.rules.chains import AcceptancePlan, ChainRows, ratios
from foreword.acceptance.rules.trees import DraftTrees, Floats, Ints


def plan(chains: ChainRows, nodes: Ints) -> AcceptancePlan:
    """Return the acceptance probability of each draft row, given that the nodes before it are accepted."""
    return AcceptancePlan(np.minimum(1.0, ratios(chains, nodes)), np.ones(len(chains.trees.tokens)))


def stop_rows(trees: DraftTrees, accept: Floats, uniforms: Floats) -> Ints:
    """Return each request's last row before the first rejection, [requests].

    `uniforms` has one random number per row of the batch.
    """
    return trees.deepest(trees.reached(uniforms < accept))
