"""What is believed of a drafter's guesses at one moment: how likely each node of a draft is to be accepted."""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from foreword.speculation.confidence import MIDDLES, class_of
from foreword.speculation.draft import ROOT, Draft

SHIFT_STEP = 0.1
SHIFT_POWER = 1.3
LEAST_SHIFT, MOST_SHIFT = round(math.log(0.2) / SHIFT_STEP), round(math.log(3.0) / SHIFT_STEP)
"""A request's luck, as the logarithm of accepted over expected guesses, in steps."""

_CERTAIN = 1e-4

_FACTORS = {s: math.exp(-SHIFT_POWER * SHIFT_STEP * s) for s in range(LEAST_SHIFT, MOST_SHIFT + 2)}


class Rates:
    """What is believed of a drafter's guesses in one cohort, at one moment."""

    def __init__(
        self,
        accepted: Sequence[Sequence[float]],
        coverage: Sequence[float],
        presence: Sequence[float] = (),
        drafted: Sequence[float] = (),
        sure: Sequence[float] = MIDDLES,
    ) -> None:
        """`accepted` is by level and rank, given that the parent is accepted; `coverage` by level, of the asks.

        Where drafts end early for being unsure: `presence` is by level, of the drafts that were right so far;
        `drafted`, of the asks, how often a level was guessed, whether or not it was worth verifying; and `sure` is by
        class, what its nodes are worth.
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
        """The acceptance rates for a request with this luck, [level][rank]."""
        found = self._shifted.get(shift)
        if found is None:
            factor = _FACTORS[shift]
            found = [[1 / (1 + odds * factor) for odds in ranks] for ranks in self._against]
            self._shifted[shift] = found
        return found

    def survival(self, shift: int) -> list[float]:
        """[level], chance that a chain's node and all above it are accepted."""
        found = self._survival.get(shift)
        if found is None:
            factor, found, chance = _FACTORS[shift], [], 1.0
            for ranks in self._against:
                chance /= 1 + ranks[0] * factor
                found.append(chance)
            self._survival[shift] = found
        return found

    def gains(self, shift: int) -> list[float]:
        """[level], guesses of an ask that are expected to be accepted there."""
        found = self._gains.get(shift)
        if found is None:
            found, present = [], self.coverage[0] if self.coverage else 0.0
            for presence, survival in zip(self._presence, self.survival(shift), strict=True):
                present *= presence
                found.append(present * survival)
            self._gains[shift] = found
        return found

    def sure_rates(self, shift: int) -> tuple[float, ...]:
        """[classes], the same of nodes by how sure the drafter is of them, for a request with this luck."""
        found = self._sure.get(shift)
        if found is None:
            factor = _FACTORS[shift]
            bounded = (min(max(rate, _CERTAIN), 1 - _CERTAIN) for rate in self.sure)
            found = self._sure[shift] = tuple(1 / (1 + (1 - rate) / rate * factor) for rate in bounded)
        return found

    def node_chances(self, draft: Draft) -> Sequence[float]:
        """[levels], the chance of a chain's nodes, all above being right, for a request like others of its cohort."""
        if draft.confidence and draft.is_chain:
            return [self.sure[class_of(one)] for one in draft.confidence]
        expected, nodes = self.expected, len(draft)
        if nodes <= len(expected):
            return expected
        return [*expected, *[expected[-1]] * (nodes - len(expected))]

    def survivals(self, draft: Draft, shift: int) -> list[float]:
        """[nodes], the chance that a node and all above it are accepted, by their places or by how sure it is."""
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
