"""Random token trees."""

import random

from foreword.speculation.draft import ROOT, Draft
from helpers.tiny_models import TINY_VOCAB


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(TINY_VOCAB) for _ in range(count)]


def random_tree(rng: random.Random, nodes: int, committed_len: int) -> Draft:
    parents = tuple(rng.randint(max(ROOT, node - 6), node - 1) for node in range(nodes))
    return Draft(tuple(random_tokens(rng, nodes)), parents, committed_len)


def root_path(draft: Draft, node: int) -> list[int]:
    """The nodes from the first level down to `node`."""
    path = []
    while node != ROOT:
        path.append(node)
        node = draft.parents[node]
    return path[::-1]
