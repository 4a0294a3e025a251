"""Estimated acceptance of each node of a draft."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import mul

from foreword.speculation.confidence import MIDDLES, class_of
from foreword.speculation.draft import ROOT, Draft

SHIFT_STEP, SHIFT_POWER = 0.1, 1.3
LEAST_SHIFT, MOST_SHIFT = round(math.log(0.2) / SHIFT_STEP), round(math.log(3.0) / SHIFT_STEP)
"""Step and range of a request's log acceptance ratio (accepted / expected), and its weight in log odds."""

_FACTORS = {s: math.exp(-SHIFT_POWER * SHIFT_STEP * s) for s in range(LEAST_SHIFT, MOST_SHIFT + 2)}


class Rates:
    """Estimated acceptance of a drafter in one cohort. `shift` is a request's log acceptance ratio in steps."""

    def __init__(
        self,
        accepted: Sequence[Sequence[float]],
        coverage: Sequence[float],
        presence: Sequence[float] = (),
        drafted: Sequence[float] = (),
        by_class: Sequence[float] = MIDDLES,
    ) -> None:
        """`accepted` is by level and rank, given that the parent is accepted; `coverage` by level, of draft requests.

        For drafts that may end early: `presence`, by level, of drafts accepted so far; `drafted`, by level, of draft
        requests, with or without an expected gain; `by_class`, acceptance by confidence class.
        """
        self.accepted, self.coverage, self.drafted = accepted, coverage, drafted or coverage
        self.by_class = by_class
        self._presence = presence or [1.0] * len(accepted)
        # [level], probability that some child is accepted
        self.expected = [min(sum(ranks), 1.0) for ranks in accepted]
        self.node_rates, self.survival = cache(self._node_rates), cache(self._survival)
        self.gains, self.class_rates = cache(self._gains), cache(self._class_rates)

    def _node_rates(self, shift: int) -> list[list[float]]:
        """Return the acceptance rates [level][rank]."""
        return [[_at_ratio(rate, shift) for rate in ranks] for ranks in self.accepted]

    def _survival(self, shift: int) -> list[float]:
        """Return [level] the probability that a chain's node and all its ancestors are accepted."""
        return list(accumulate([_at_ratio(ranks[0], shift) for ranks in self.accepted], mul))

    def _gains(self, shift: int) -> list[float]:
        """Return [level] the expected accepted tokens per draft request.

        They are at most the share of requests whose draft has the level: that is known from every draft, and presence
        only from those that were accepted so far.
        """
        present = accumulate(self._presence, mul, initial=self.coverage[0] if self.coverage else 0.0)
        next(present)
        known = zip(present, self.survival(shift), self.coverage, strict=True)
        return [min(p * s, covered) for p, s, covered in known]

    def _class_rates(self, shift: int) -> tuple[float, ...]:
        """Return [class] the acceptance rates by confidence class."""
        return tuple(_at_ratio(rate, shift) for rate in self.by_class)

    def survivals(self, draft: Draft, shift: int) -> list[float]:
        """Return [nodes] the probability that a node and all its ancestors are accepted, by confidence or by place."""
        if draft.is_chain:
            if draft.confidence:
                rates = self.class_rates(shift)
                return list(accumulate([rates[class_of(one)] for one in draft.confidence], mul))
            known = self.survival(shift)
            if len(draft.parents) <= len(known):
                return known[: len(draft.parents)]
            last = self.node_rates(shift)[-1][0]
            return [
                *known,
                *(known[-1] * last ** (level + 1) for level in range(len(draft.parents) - len(known))),
            ]
        found: list[float] = []
        children: dict[int, int] = {}
        for parent, depth in zip(draft.parents, draft.depths(), strict=True):
            rank = children[parent] = children.get(parent, -1) + 1
            ranks = self.node_rates(shift)[min(depth, len(self.accepted)) - 1]
            found.append((1.0 if parent == ROOT else found[parent]) * ranks[min(rank, len(ranks) - 1)])
        return found


def _at_ratio(rate: float, shift: int) -> float:
    """Return the acceptance rate of a request with this ratio, given its cohort's rate."""
    rate = min(max(rate, 1e-4), 1 - 1e-4)
    return 1 / (1 + (1 - rate) / rate * _FACTORS[shift])
