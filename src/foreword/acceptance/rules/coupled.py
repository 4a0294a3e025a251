"""The coupled rule: the target draws with noise named by position; a node survives if it is that draw.

The token at a position is a function of the history, the parameters, the seed and the position alone. A draft can
only make it known earlier, so the text is the same with any draft or none.
"""

from collections.abc import Sequence

from foreword.acceptance.rules.trees import DraftTrees

REFUSED = -1


def stop_rows(trees: DraftTrees, draws: Sequence[int]) -> list[int]:
    """[requests], the deepest row all of whose tokens are what the target drew; draws are per row."""
    stops = trees.starts[:-1]
    if trees.is_plain:
        return stops
    tokens, parents = trees.token_list, trees.parent_list
    depths = [0] * len(tokens)  # REFUSED where a token on the way was not drawn
    for request, (root, end) in enumerate(zip(trees.starts, trees.starts[1:], strict=False)):
        for row in range(root + 1, end):  # parents come before their children
            parent = parents[row]
            hit = depths[parent] != REFUSED and tokens[row] == draws[parent]
            depths[row] = depths[parent] + 1 if hit else REFUSED
            if depths[row] > depths[stops[request]]:
                stops[request] = row
    return stops
