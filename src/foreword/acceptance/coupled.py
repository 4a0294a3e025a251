"""The coupled rule: the target draws with noise named by position; a node survives if it is that draw.

The token at a position is a function of the history, the parameters, the seed and the position alone. A draft can
only make it known earlier, so the text is the same with any draft or none.
"""

from foreword.acceptance.trees import DraftTrees, Ints


def stop_rows(trees: DraftTrees, draws: Ints) -> Ints:
    """[requests], the deepest row all of whose tokens are what the target drew; draws are per row."""
    hit = trees.tokens == draws[trees.parents]
    return trees.deepest(trees.reached(hit))
