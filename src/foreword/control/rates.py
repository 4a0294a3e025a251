"""How likely each node of a draft is to be accepted, as estimated at one moment."""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from foreword.speculation.confidence import MIDDLES, class_of
from foreword.speculation.draft import ROOT, Draft

SHIFT_STEP = 0.1
SHIFT_POWER = 1.3
LEAST_SHIFT, MOST_SHIFT = round(math.log(0.2) / SHIFT_STEP), round(math.log(3.0) / SHIFT_STEP)
"""A request's acceptance ratio (accepted / expected tokens): its logarithm in steps, and what it weighs in log odds."""

_CERTAIN = 1e-4

_FACTORS = {s: math.exp(-SHIFT_POWER * SHIFT_STEP * s) for s in range(LEAST_SHIFT, MOST_SHIFT + 2)}


class Rates:
    """The estimated acceptance of a drafter in one cohort, at one moment."""

    def __init__(
        self,
        accepted: Sequence[Sequence[float]],
        coverage: Sequence[float],
        presence: Sequence[float] = (),
        drafted: Sequence[float] = (),
        sure: Sequence[float] = MIDDLES,
    ) -> None:
        """`accepted` is by level and rank, given that the parent is accepted; `coverage` by level, of draft requests.

        Where drafts end early: `presence` is by level, of the drafts that were accepted so far; `drafted`, of draft
        requests, how often a level was drafted, with a net benefit or not; `sure` the acceptance by confidence class.
        """
        self.accepted = accepted
        self.coverage = coverage
        self.drafted = drafted or coverage
        self.sure = sure
        self._presence = presence or [1.0] * len(accepted)
        self.expected = [min(sum(ranks), 1.0) for ranks in accepted]  # [level], that some child is accepted
        bounded = ((min(max(rate, _CERTAIN), 1 - _CERTAIN) for rate in ranks) for ranks in accepted)
        self._against = [[(1 - rate) / rate for rate in ranks] for ranks in bounded]  # odds
        self._shifted: dict[int, list[list[float]]] = {}
        self._survival: dict[int, list[float]] = {}
        self._gains: dict[int, list[float]] = {}
        self._sure: dict[int, tuple[float, ...]] = {}

    def node_rates(self, shift: int) -> list[list[float]]:
        """Return the acceptance rates for a request with this ratio, [level][rank]."""
        found = self._shifted.get(shift)
        if found is None:
            factor = _FACTORS[shift]
            found = [[1 / (1 + odds * factor) for odds in ranks] for ranks in self._against]
            self._shifted[shift] = found
        return found

    def survival(self, shift: int) -> list[float]:
        """Return [level] the chance that a chain's node and all above it are accepted."""
        found = self._survival.get(shift)
        if found is None:
            factor, found, chance = _FACTORS[shift], [], 1.0
            for ranks in self._against:
                chance /= 1 + ranks[0] * factor
                found.append(chance)
            self._survival[shift] = found
        return found

    def gains(self, shift: int) -> list[float]:
        """Return [level] the draft tokens of a draft request that are expected to be accepted."""
        found = self._gains.get(shift)
        if found is None:
            found, present = [], self.coverage[0] if self.coverage else 0.0
            for presence, survival in zip(self._presence, self.survival(shift), strict=True):
                present *= presence
                found.append(present * survival)
            self._gains[shift] = found
        return found

    def sure_rates(self, shift: int) -> tuple[float, ...]:
        """Return [classes] the acceptance rates by confidence for a request with this ratio."""
        found = self._sure.get(shift)
        if found is None:
            factor = _FACTORS[shift]
            bounded = (min(max(rate, _CERTAIN), 1 - _CERTAIN) for rate in self.sure)
            found = self._sure[shift] = tuple(1 / (1 + (1 - rate) / rate * factor) for rate in bounded)
        return found

    def node_chances(self, draft: Draft) -> Sequence[float]:
        """Return [levels] the acceptance of a chain's nodes given their parents, for an average request."""
        if draft.confidence and draft.is_chain:
            return [self.sure[class_of(one)] for one in draft.confidence]
        expected, nodes = self.expected, len(draft)
        if nodes <= len(expected):
            return expected
        return [*expected, *[expected[-1]] * (nodes - len(expected))]

    def survivals(self, draft: Draft, shift: int) -> list[float]:
        """Return [nodes] the chance that a node and all above it are accepted, by confidence or by place."""
        if draft.is_chain:
            if draft.confidence:
                rates = self.sure_rates(shift)
                return list(accumulate([rates[class_of(one)] for one in draft.confidence], mul))
            known = self.survival(shift)
            if len(draft) <= len(known):
                return known[: len(draft)]
            last = self.node_rates(shift)[-1][0]
            return [*known, *(known[-1] * last ** (more + 1) for more in range(len(draft) - len(known)))]
        node_rates = self.node_rates(shift)
        found: list[float] = []
        children: dict[int, int] = {}
        for parent, depth in zip(draft.parents, draft.depths(), strict=True):
            rank = children.get(parent, 0)
            children[parent] = rank + 1
            ranks = node_rates[min(depth, len(node_rates)) - 1]
            found.append((1.0 if parent == ROOT else found[parent]) * ranks[min(rank, len(ranks) - 1)])
        return found
