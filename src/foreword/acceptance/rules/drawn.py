"""The distribution q that a draft token was drawn from, in sparse form."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

ID_BITS = 32


@dataclass(frozen=True)
class Drawn:
    """Sparse distribution of a sampled draft token; read-only."""

    ids: Ints  # [support], distinct, ascending
    probs: Floats  # [support], non-negative, sum 1

    def __post_init__(self) -> None:
        if (
            self.ids.shape != self.probs.shape
            or self.ids.ndim != 1
            or (not _rises(self.ids) and len(np.unique(self.ids)) != len(self.ids))
        ):
            raise ValueError("q needs distinct ids and one probability for each")
        if np.any(self.ids < 0):
            raise ValueError("q has a negative id")
        if not np.all(np.isfinite(self.probs)) or np.any(self.probs < 0) or abs(self.probs.sum() - 1) > 1e-4:
            raise ValueError("q must hold probabilities that sum to 1")
        order = slice(None) if _rises(self.ids) else np.argsort(self.ids)
        ids = np.array(self.ids[order], np.int64)
        probs = np.array(self.probs[order], np.float64) / self.probs.astype(np.float64).sum()
        ids.flags.writeable = probs.flags.writeable = False
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "probs", probs)

    def prob(self, token: int) -> float:
        """Return the probability of a token; 0 outside the support."""
        slot = int(np.searchsorted(self.ids, token))
        return float(self.probs[slot]) if slot < len(self.ids) and self.ids[slot] == token else 0.0


def _rises(ids: Ints) -> bool:
    """Return whether the ids are sorted and distinct; faster than sorting a whole vocabulary."""
    return bool((ids[1:] > ids[:-1]).all())


@dataclass(frozen=True)
class NodeProbabilities:
    """The q of every draft node of a batch; a chosen node has probability 1 at its token."""

    rows: Ints  # [support], row of the entry's node, ascending
    ids: Ints  # [support], ascending within a row
    probs: Floats  # [support]

    @staticmethod
    def stack(rows: Ints, tokens: Ints, drawn: Sequence[Drawn | None]) -> "NodeProbabilities":
        """Concatenate the nodes' supports in row order."""
        sizes = np.array([1 if q is None else len(q.ids) for q in drawn], np.int64)
        chosen = [token if q is None else q.ids for token, q in zip(tokens[:, None], drawn, strict=True)]
        certain = np.ones(1)
        probs = [certain if q is None else q.probs for q in drawn]
        ids, joined = np.concatenate([np.empty(0, np.int64), *chosen]), np.concatenate([np.empty(0), *probs])
        joined.flags.writeable = False
        return NodeProbabilities(np.repeat(rows, sizes), ids, joined)

    def at(self, rows: Ints, ids: Ints) -> Floats:
        """[pairs], q of the row's node at each id; 0 outside its support."""
        keys = (self.rows << ID_BITS) + self.ids
        wanted = (rows << ID_BITS) + ids
        slot = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
        if not len(keys):
            return np.zeros(len(wanted))
        return np.where(keys[slot] == wanted, self.probs[slot], 0.0)
