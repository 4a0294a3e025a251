"""Token-by-token rejection sampling (Leviathan et al. 2023, Chen et al. 2023), for chains.

A token x drawn from q is accepted with probability min(1, p(x) / q(x)); at the first refusal the own token is
drawn from max(p - q, 0), and behind the last node from p. Per position it accepts 1 - TV(p, q).
"""

import numpy as np

from foreword.acceptance.chains import ChainRows, Leftover
from foreword.acceptance.trees import NO_ROW, DraftTrees, Floats, Ints


def acceptance(chains: ChainRows, nodes: Ints) -> Floats:
    """[all rows], the probability with which each node is accepted once its parent is; nodes hold no roots."""
    trees = chains.trees
    accept = np.zeros(len(trees.tokens))
    p, q = chains.target(nodes - 1, trees.tokens[nodes]), trees.q.at(nodes, trees.tokens[nodes])
    accept[nodes] = np.minimum(1.0, np.divide(p, q, out=np.zeros_like(p), where=q > 0))
    return accept


def stop_rows(trees: DraftTrees, accept: Floats, uniforms: Floats) -> Ints:
    """[requests], the last row before the first refusal; uniforms are per row."""
    return trees.deepest(trees.reached(uniforms < accept))


def leftover(trees: DraftTrees, stops: Ints) -> Leftover:
    """What the own tokens come from: the residual where a node was refused, else the target itself."""
    next_rows = next_in_chain(trees, stops)
    return Leftover(stops, np.ones(len(stops)), next_rows)


def next_in_chain(trees: DraftTrees, stops: Ints) -> Ints:
    """[stops], the node behind each stop row, NO_ROW behind the last."""
    ends = trees.row_starts[1:][trees.request_of_row[stops]]
    return np.where(stops + 1 < ends, stops + 1, NO_ROW)
