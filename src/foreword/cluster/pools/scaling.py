"""How many draft nodes a fleet of targets needs; the simulator uses the same formula."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

UTILISATION = 0.7
"""Part of a step that a node may draft in: what is left takes up bursts and late messages."""

LevelSeconds = Callable[[int], float]
"""Seconds of one level for so many requests at once; more requests never take less."""


@dataclass(frozen=True)
class DraftWork:
    """What drafting for one request means, in every step of its target."""

    levels: float  # that are wanted
    step_seconds: float  # of the target: its pass, and what it waits
    ahead: float = 1.0  # levels drafted for every level wanted: 1, or 2.0 to 2.4 where nodes run ahead
    utilisation: float = UTILISATION


def gained_tokens(acceptance: float, levels: int) -> float:
    """Return the accepted draft tokens of a pass, each accepted with this probability if those before it are."""
    return sum(acceptance**level for level in range(1, levels + 1))


def requests_per_node(work: DraftWork, level_seconds: LevelSeconds, capacity: int) -> int:
    """The most requests m for which ahead · levels · level_seconds(m) fits into a node's part of a step.

    `capacity` is what the node's memory holds. 0: not even one fits, so that no number of nodes keeps up; fewer levels
    or a faster drafter may.
    """

    def fits(requests: int) -> bool:
        drafting = work.ahead * work.levels * level_seconds(requests)
        return drafting <= work.utilisation * work.step_seconds

    fitting, too_many = 0, capacity + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting


def wanted_draft_nodes(requests: int, work: DraftWork, level_seconds: LevelSeconds, capacity: int) -> int:
    """Nodes that draft for so many requests of all targets in time; 0 where none could (`requests_per_node`).

    For targets of batch B that is B / m of a node each. The reserve is in `DraftWork.utilisation`, once.
    """
    per_node = requests_per_node(work, level_seconds, capacity)
    return math.ceil(requests / per_node) if per_node else 0


UNBOUNDED = 1 << 20
"""Requests that a node's memory holds where no bound is given."""

KEPT_FOR = 0.8
"""Part of its price that a node has to earn to stay: a little less than what one is added for."""


@dataclass(frozen=True)
class ScaleRule:
    """When to have more nodes, and when fewer."""

    node: str  # the member of which there are more or fewer
    least: int = 1
    most: int = 8
    levels: int = 5  # that a pass verifies
    ahead: float = 2.0  # levels that are drafted for one that is used: 1 without running ahead
    doubling: float = 200.0  # requests with which a level takes twice as long as for one alone
    kv_tokens: int = 0  # that a node's cache holds; 0: no bound
    context: int = 0  # tokens of a usual request
    use: float = 0.7  # part of a step that drafting may take
    idle: float = 0.5  # part below which there are too many nodes
    up_seconds: float = 10.0  # for which there have to be too few
    down_seconds: float = 300.0  # for which there have to be too many
    # Nodes beyond `least` are there only while each earns what it costs; by need alone unless both are given.
    node_price: float = 0.0  # of an hour of one node
    token_price: float = 0.0  # of a million tokens that targets make


@dataclass(frozen=True)
class Demand:
    """What one target asks of nodes."""

    requests: float
    step_seconds: float  # from one pass to the next


@dataclass(frozen=True)
class NodeSpeed:
    """What was measured of nodes."""

    level_seconds: float
    requests: float  # of one node, when that was measured
    acceptance: float | None = None  # of its first level; None: unknown


def requests_served(speed: NodeSpeed, step_seconds: float, rule: ScaleRule, use: float) -> int:
    """By one node, of a target with such steps; a level takes t(m) = t0 (1 + m / doubling).

    If drafting ahead leaves no room for a single request, it is taken to be left; one request fits in any case.
    """
    alone = speed.level_seconds / (1 + speed.requests / rule.doubling)
    capacity = max(rule.kv_tokens // rule.context, 1) if rule.kv_tokens and rule.context else UNBOUNDED
    for ahead in (rule.ahead, 1.0):
        work = DraftWork(rule.levels, step_seconds, ahead, use)
        found = requests_per_node(work, lambda requests: alone * (1 + requests / rule.doubling), capacity)
        if found:
            return found
    return 1


def nodes_needed(demands: Sequence[Demand], speed: NodeSpeed, rule: ScaleRule, use: float) -> int:
    """Of every target the requests by those that a node can serve beside steps as long as its own."""
    return min(max(math.ceil(_need(demands, speed, rule, use) - 1e-9), rule.least), rule.most)


def nodes_worth(demands: Sequence[Demand], speed: NodeSpeed, rule: ScaleRule, part: float = 1.0) -> int:
    """The most nodes of which each earns more than this part of its price, by the tokens that it adds.

    Requests that no node has room for gain nothing, so that all nodes but the last earn the same.
    """
    need = _need(demands, speed, rule, rule.use)
    if not (rule.node_price and rule.token_price and need) or speed.acceptance is None:
        return rule.most
    passes = sum(one.requests / one.step_seconds for one in demands if one.requests)  # of requests, a second
    tokens = gained_tokens(speed.acceptance, rule.levels) * passes * 3600 / need  # of a full node, an hour
    least = part * rule.node_price / (tokens * rule.token_price / 1e6) if tokens else math.inf
    full = math.floor(need + 1e-9)
    worth = 0 if least >= 1 else full + (need - full > least)
    return min(max(worth, rule.least), rule.most)


def _need(demands: Sequence[Demand], speed: NodeSpeed, rule: ScaleRule, use: float) -> float:
    return sum(
        one.requests / requests_served(speed, one.step_seconds, rule, use) for one in demands if one.requests
    )


class Scaler:
    """Goes up at once to what has been needed for a while, and down one by one after a long one.

    What is too much is judged by a lower use than what is too little, so that the answer to one is never a reason for
    the other.
    """

    def __init__(self, rule: ScaleRule, clock: Callable[[], float] = monotonic) -> None:
        self.rule = rule
        self._clock = clock
        self._few_since: float | None = None
        self._many_since: float | None = None

    def size(self, have: int, demands: Sequence[Demand], speed: NodeSpeed | None) -> int:
        """Return the number of nodes that there should be now; unchanged while their speed is unknown."""
        rule, now = self.rule, self._clock()
        bounded = min(max(have, rule.least), rule.most)
        is_idle = not any(one.requests for one in demands)
        if speed is None and not is_idle:
            self._few_since = self._many_since = None
            return bounded
        needed = enough = rule.least
        if speed is not None:
            needed = min(nodes_needed(demands, speed, rule, rule.use), nodes_worth(demands, speed, rule))
            enough = min(
                nodes_needed(demands, speed, rule, rule.idle), nodes_worth(demands, speed, rule, KEPT_FOR)
            )
        self._few_since = _since(self._few_since, needed > have, now)
        self._many_since = _since(self._many_since, enough < have, now)
        if self._few_since is not None and now - self._few_since >= rule.up_seconds:
            self._few_since = None
            return needed
        if self._many_since is not None and now - self._many_since >= rule.down_seconds:
            self._many_since = now
            return max(have - 1, rule.least)
        return bounded


def _since(before: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before
