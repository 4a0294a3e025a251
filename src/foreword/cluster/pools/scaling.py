"""Number of draft nodes that targets need; also used by the simulator."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

UTILISATION = 0.7  # fraction of a step in which a node may draft; the rest absorbs bursts and delays
LevelSeconds = Callable[[int], float]  # seconds per level by number of concurrent requests, non-decreasing


@dataclass(frozen=True)
class DraftWork:
    """Drafting work per request and step of its target."""

    levels: float  # wanted levels
    step_seconds: float  # time of a step of the target: its pass, and the wait for drafts
    ahead: float = 1.0  # drafted levels per used level: 1, or 2.0 to 2.4 with run-ahead
    utilisation: float = UTILISATION  # fraction of a step in which a node may draft


def gained_tokens(acceptance: float, levels: int) -> float:
    """Return the accepted draft tokens per pass, if each is accepted with this probability given those before."""
    return sum(acceptance**level for level in range(1, levels + 1))


def requests_per_node(work: DraftWork, level_seconds: LevelSeconds, capacity: int) -> int:
    """Return the number of requests for which a node can draft in time.

    This is the largest m up to `capacity`, the limit of the node's memory, for which
    ahead · levels · level_seconds(m) <= utilisation · step_seconds. Return 0 if not even one request fits: then the
    node needs fewer levels or a faster drafter.
    """

    def fits(requests: int) -> bool:
        drafting = work.ahead * work.levels * level_seconds(requests)
        return drafting <= work.utilisation * work.step_seconds

    return bisect_left(range(1, capacity + 1), True, key=lambda requests: not fits(requests))


def wanted_draft_nodes(requests: int, work: DraftWork, level_seconds: LevelSeconds, capacity: int) -> int:
    """Return the nodes needed for `requests` requests; 0 if no node can serve even one."""
    per_node = requests_per_node(work, level_seconds, capacity)
    return math.ceil(requests / per_node) if per_node else 0


UNBOUNDED = 1 << 20  # capacity of a node without a limit
KEPT_FOR = 0.8  # fraction of its price below which a node is removed; it is added at its full price


@dataclass(frozen=True)
class ScaleRule:
    """Settings of adding and removing nodes."""

    node: str  # name of the node that is replicated
    least: int = 1  # minimum number of nodes
    most: int = 8  # maximum number of nodes
    levels: int = 5  # draft levels verified per pass
    ahead: float = 2.0  # drafted levels per used level; 1 without run-ahead
    doubling: float = 200.0  # requests at which a level takes twice as long as for one
    kv_tokens: int = 0  # KV cache of a node; 0: no limit
    context: int = 0  # tokens of a typical request
    use: float = 0.7  # maximum fraction of a step for drafting
    idle: float = 0.5  # fraction of a step for drafting below which there are too many nodes
    up_seconds: float = 10.0  # add nodes after too few for this long
    down_seconds: float = 300.0  # remove a node after too many for this long
    # With both prices, nodes beyond `least` run only while each earns its cost.
    node_price: float = 0.0  # per hour of one node
    token_price: float = 0.0  # per million generated tokens


@dataclass(frozen=True)
class Demand:
    """Demand of one target."""

    requests: float
    step_seconds: float  # between passes


@dataclass(frozen=True)
class NodeSpeed:
    """Measured speed of nodes."""

    level_seconds: float  # time per draft level
    requests: float  # requests per node during the measurement
    acceptance: float | None = None  # acceptance rate of the first level; None: unknown


def requests_served(speed: NodeSpeed, step_seconds: float, rule: ScaleRule, use: float) -> int:
    """Return the requests that one node can serve for such steps; a level takes t(m) = t0 (1 + m / doubling).

    If not even one request fits with run-ahead, the result is without run-ahead; it is at least 1.
    """
    alone = speed.level_seconds / (1 + speed.requests / rule.doubling)
    capacity = max(rule.kv_tokens // rule.context, 1) if rule.kv_tokens and rule.context else UNBOUNDED
    for ahead in (rule.ahead, 1.0):
        work = DraftWork(rule.levels, step_seconds, ahead, use)
        served = requests_per_node(work, lambda requests: alone * (1 + requests / rule.doubling), capacity)
        if served:
            return served
    return 1


def nodes_needed(demands: Sequence[Demand], speed: NodeSpeed, rule: ScaleRule, use: float) -> int:
    """Return the number of nodes that serve all demands, within the rule's minimum and maximum."""
    return min(max(math.ceil(_need(demands, speed, rule, use) - 1e-9), rule.least), rule.most)


def profitable_nodes(demands: Sequence[Demand], speed: NodeSpeed, rule: ScaleRule, part: float = 1.0) -> int:
    """Return the maximum number of nodes that each earn more than a fraction (`part`) of their price.

    All nodes but the last are fully used, so they earn the same.
    """
    need = _need(demands, speed, rule, rule.use)
    if not (rule.node_price and rule.token_price and need) or speed.acceptance is None:
        return rule.most
    # Per second, summed over requests.
    passes = sum(one.requests / one.step_seconds for one in demands if one.requests)
    tokens = gained_tokens(speed.acceptance, rule.levels) * passes * 3600 / need  # of a full node, per hour
    least = part * rule.node_price / (tokens * rule.token_price / 1e6) if tokens else math.inf
    full = math.floor(need + 1e-9)
    profitable = 0 if least >= 1 else full + (need - full > least)
    return min(max(profitable, rule.least), rule.most)


def _need(demands: Sequence[Demand], speed: NodeSpeed, rule: ScaleRule, use: float) -> float:
    """Return the number of nodes that serve all demands, as a fraction."""
    return sum(
        one.requests / requests_served(speed, one.step_seconds, rule, use) for one in demands if one.requests
    )


class Scaler:
    """Scales up to a need at once when it has lasted `up_seconds`, and down node by node after `down_seconds` each.

    Scaling down uses a lower utilisation than scaling up, so that neither triggers the other.
    """

    def __init__(self, rule: ScaleRule, clock: Callable[[], float] = monotonic) -> None:
        self.rule = rule
        self._clock = clock
        self._few_since: float | None = None  # since when there have been too few nodes; None: enough
        self._many_since: float | None = None  # since when there have been too many

    def size(self, have: int, demands: Sequence[Demand], speed: NodeSpeed | None) -> int:
        """Return the number of nodes to run, given that `have` run; unchanged while their speed is unknown."""
        rule, now = self.rule, self._clock()
        bounded = min(max(have, rule.least), rule.most)
        is_idle = not any(one.requests for one in demands)
        if speed is None and not is_idle:
            self._few_since = self._many_since = None
            return bounded
        needed = enough = rule.least
        if speed is not None:
            needed = min(nodes_needed(demands, speed, rule, rule.use), profitable_nodes(demands, speed, rule))
            enough = min(
                nodes_needed(demands, speed, rule, rule.idle),
                profitable_nodes(demands, speed, rule, KEPT_FOR),
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
    """Return the time since which a condition holds, given the previous result; None if it does not hold now."""
    if not holds:
        return None
    return now if before is None else before
