"""Adds and drains draft nodes as targets need them."""

import logging
from collections.abc import Callable
from time import monotonic

from foreword.cluster.pools.demand import DemandWatch
from foreword.cluster.pools.fleet import Fleet, numbers, resize
from foreword.cluster.pools.members import TARGET, Member
from foreword.cluster.pools.scaling import Scaler, ScaleRule
from foreword.cluster.pools.status import Fetch

_log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0


class Autoscaler:
    """Looks at the targets now and then; targets themselves are never added for the sake of drafts."""

    def __init__(
        self,
        rule: ScaleRule,
        node: Member,
        fleet: Fleet,
        fetch: Fetch,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._node = node
        self._fleet = fleet
        self._watch = DemandWatch(fetch)
        self._scaler = Scaler(rule, clock)
        self._clock = clock
        self._looked = float("-inf")

    def look(self) -> None:
        """Have as many nodes as there should be, if it is time to look."""
        if self._clock() - self._looked < LOOK_SECONDS:
            return
        self._looked = self._clock()
        targets = [one for one in self._fleet.members() if one.kind == TARGET]
        demands, speed = self._watch.look([f"http://{one.address}" for one in targets])
        have = len(numbers(self._fleet, self._node.name))
        wanted = self._scaler.size(have, demands, speed)
        if wanted != have:
            requests = sum(one.requests for one in demands)
            _log.info("%d draft nodes instead of %d, for %g requests", wanted, have, requests)
            resize(self._fleet, self._node, wanted)
