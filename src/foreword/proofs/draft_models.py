"""Small drafters for proofs: a distribution after every history, drawn from or chosen by."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from foreword.acceptance.reference.distribution import probabilities
from foreword.acceptance.rules.drawn import Drawn, Floats
from foreword.proofs.cases import Case, target_logits


class Guessing(Enum):
    """How a drafter comes to its tokens."""

    DRAWN = "drawn"  # from a full distribution
    SPARSE = "q with zeros"  # from a distribution that leaves out tokens that the target has
    SAME = "q = p"  # from the target's own distribution
    CHOSEN = "chosen"  # its most likely token, without q
    MIXED = "mixed"  # chosen and drawn in turns


@dataclass(frozen=True)
class DraftModel:
    """A drafter whose distribution is a mixture of the target's and of a stranger's."""

    case: Case  # the request that it drafts for
    guessing: Guessing
    likeness: float = 0.5  # 1: the target's own distribution, 0: a stranger's
    _known: dict[tuple[int, ...], Floats] = field(default_factory=dict, repr=False, compare=False)

    def probabilities(self, history: tuple[int, ...]) -> Floats:
        """[vocab], q after a history (prompt included)."""
        if history not in self._known:
            self._known[history] = self._probabilities(history)
        return self._known[history].copy()

    def _probabilities(self, history: tuple[int, ...]) -> Floats:
        generated = history[len(self.case.prompt) :]
        stranger = Case(self.case.params, self.case.limits, self.case.prompt, 0, self.case.target ^ 1)
        rows = []
        for case in (self.case, stranger):
            logits = target_logits([case], [[history]])[0].tolist()
            if case is self.case:
                allowed = case.allowed(generated)
                rows.append(probabilities(logits, case.params, case.limits, case.prompt, generated, allowed))
            else:
                weights = np.exp(logits)
                rows.append(list(weights / weights.sum()))
        likeness = 1.0 if self.guessing is Guessing.SAME else self.likeness
        q = likeness * np.array(rows[0]) + (1 - likeness) * np.array(rows[1])
        if self.guessing is Guessing.SPARSE:
            q[np.argmax(q) if len(generated) % 2 else np.argmin(q)] = 0
        return np.asarray(q / q.sum(), np.float64)

    def guesses(
        self, history: tuple[int, ...], without: tuple[int, ...] = ()
    ) -> Iterator[tuple[int, Drawn | None, float]]:
        """Every next guess after a history: token, what it was drawn from (None: chosen), probability.

        `without` are siblings before it that are not guessed again; where there is no other token, there is no guess.
        """
        q = self.probabilities(history)
        q[list(without)] = 0
        if not q.any():
            return
        q /= q.sum()
        in_turn = self.guessing is Guessing.MIXED and len(history) % 2 == 0
        if self.guessing is Guessing.CHOSEN or in_turn:
            yield int(np.argmax(q)), None, 1.0
            return
        support = np.flatnonzero(q)
        drawn = Drawn(support, q[support])
        for guess in support:
            yield int(guess), drawn, float(q[guess])
