"""The coupled rule: a draft token is accepted if it equals the token that the target samples at this position.

The target's noise depends on seed and position only, so its token is a function of history, parameters, seed and
position. The text is therefore the same with any draft, and without drafts.
"""

from collections.abc import Sequence

from foreword.acceptance.rules.trees import DraftTrees


def stop_rows(trees: DraftTrees, draws: Sequence[int]) -> list[int]:
    """Return each request's deepest row whose path equals the target's samples, [requests].

    `draws` has the token that the target samples after each row.
    """
    stops = trees.starts[:-1]
    if trees.is_plain:
        return stops
    tokens, parents = trees.token_list, trees.parent_list
    for request, (root, end) in enumerate(zip(trees.starts, trees.starts[1:], strict=False)):
        if trees.are_chains or parents[root + 1 : end] == list(range(root, end - 1)):  # the common case
            row, last = root, end - 1
            while row < last and tokens[row + 1] == draws[row]:
                row += 1
            stops[request] = row
        else:
            stops[request] = _deepest(tokens, parents, draws, root, end)
    return stops


def _deepest(tokens: Sequence[int], parents: Sequence[int], draws: Sequence[int], root: int, end: int) -> int:
    """Return the deepest accepted row of a tree with rows [root, end)."""
    stop, depths = root, {root: 0}  # `depths` has the accepted rows
    for row in range(root + 1, end):  # parents come before their children
        parent = parents[row]
        if parent in depths and tokens[row] == draws[parent]:
            depths[row] = depths[parent] + 1
            if depths[row] > depths[stop]:
                stop = row
    return stop
