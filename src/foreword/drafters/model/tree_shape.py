"""The shape of trees that are drawn: fixed by the sizes alone, before any token is known."""

from functools import lru_cache

FIRST_SHARE = 0.7
"""How often a first sibling is taken to be right, and a next one where those before it are not."""

Shape = tuple[tuple[int, ...], ...]
"""[levels][nodes of the level before], how many nodes follow each; the first level follows the text."""


@lru_cache(maxsize=256)
def fixed_shape(width: int, max_nodes: int, max_depth: int) -> Shape:
    """`width` nodes on every level while there are nodes left, behind those that are likeliest to be reached."""
    levels: list[tuple[int, ...]] = []
    reached, left = [1.0], max_nodes
    while left > 0 and len(levels) < max_depth:
        offered = [
            (-chance * FIRST_SHARE * (1 - FIRST_SHARE) ** rank, parent)
            for parent, chance in enumerate(reached)
            for rank in range(width)
        ]
        chosen = sorted(sorted(offered)[: min(width, left)], key=lambda node: node[1])
        levels.append(tuple(sum(parent == place for _, parent in chosen) for place in range(len(reached))))
        reached, left = [-chance for chance, _ in chosen], left - len(chosen)
    return tuple(levels)
