"""Drafters for tests: they know what the target will say, and lie as often as they are told to."""

import random
from collections.abc import Callable, Sequence

from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask

Oracle = Callable[[Sequence[int], DraftRequest], int]
"""The token that follows these tokens."""


class RandomTreeDrafter(Drafter):
    """Random trees in which, with probability `truth`, a child carries the token that really follows."""

    def __init__(self, oracle: Oracle, vocab_size: int, truth: float, seed: int) -> None:
        self._oracle = oracle
        self._vocab_size = vocab_size
        self._truth = truth
        self._rng = random.Random(seed)

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        return [self._tree(ask) for ask in asks]

    def forget(self, request: DraftRequest) -> None:
        pass

    def _tree(self, ask: DraftTask) -> Draft:
        histories = {ROOT: list(ask.request.tokens)}
        depths = {ROOT: 0}
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(self._rng.randint(0, ask.max_nodes)):
            open_parents = [p for p in depths if depths[p] < ask.max_depth]
            if not open_parents:
                break
            parent = self._rng.choice(open_parents[-4:])
            token = self._token(histories[parent], ask.request)
            tokens.append(token)
            parents.append(parent)
            histories[node] = [*histories[parent], token]
            depths[node] = depths[parent] + 1
        return Draft(tuple(tokens), tuple(parents), len(ask.request.tokens), ask.request.epoch)

    def _token(self, history: list[int], request: DraftRequest) -> int:
        if self._rng.random() < self._truth:
            return self._oracle(history, request)
        return self._rng.randrange(self._vocab_size)
