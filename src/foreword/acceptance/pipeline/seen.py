"""Which tokens a request has seen, and how often: what penalties need, without a row per vocabulary entry."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class SeenTokens:
    """Distinct committed tokens in order of first appearance, with how often each was generated."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._table: Ints = np.zeros((2, 64), np.int64)  # ids; times generated

    def add(self, tokens: Sequence[int], generated: bool) -> None:
        """Count committed tokens; prompt tokens are seen but not generated."""
        for token in tokens:
            slot = self._slots.setdefault(int(token), len(self._slots))
            if slot == self._table.shape[1]:
                self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._table[0, slot] = token
            self._table[1, slot] += generated

    @property
    def ids(self) -> Ints:
        return self._table[0, : len(self._slots)]

    @property
    def generated(self) -> Ints:
        """How often each of `ids` was generated."""
        return self._table[1, : len(self._slots)]
