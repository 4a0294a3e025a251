"""Computes how many draft nodes targets need; the simulator uses it, too."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

UTILISATION = 0.7  # fraction of a step in which a node may draft; the rest absorbs bursts and delays
LevelSeconds = Callable[[int], float]
"""Returns the seconds per draft level for a number of concurrent requests; non-decreasing."""


@dataclass(frozen=True)
class DraftWork:
    """Drafting work per request and step of its target."""

    levels: float  # draft levels that the target verifies
    step_seconds: float  # time of a step of the target: its pass, and the wait for drafts
    ahead: float = 1.0  # drafted levels per verified level: 1, or 2.0 to 2.4 with run-ahead
    utilisation: float = UTILISATION  # fraction of a step in which a node may draft


def gained_tokens(acceptance: float, levels: int) -> float:
    """Return the expected accepted draft tokens per pass; `acceptance` is each level's rate, given those before it."""
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

    # The first number that does not fit has as many smaller numbers as requests fit.
    return bisect_left(range(1, capacity + 1), True, key=lambda requests: not fits(requests))


def wanted_draft_nodes(requests: int, work: DraftWork, level_seconds: LevelSeconds, capacity: int) -> int:
    """Return the number of nodes needed for `requests` requests; 0 if a node cannot serve even one."""
    per_node = requests_per_node(work, level_seconds, capacity)
    return math.ceil(requests / per_node) if per_node else 0


UNBOUNDED = 1 << 20  # capacity of a node without a limit, in requests
KEPT_FOR = 0.8  # fraction of a node's price: a node that earns less is removed, one that would earn the price is added


@dataclass(frozen=True)
class ScaleRule:
    """Settings of adding and removing nodes."""

    node: str  # name of the node that is replicated
    least: int = 1  # minimum number of nodes
    most: int = 8  # maximum number of nodes
    levels: int = 5  # draft levels verified per pass
    ahead: float = 2.0  # drafted levels per verified level; 1 without run-ahead
    doubling: float = 200.0  # number of requests for which a level takes twice as long as for one
    kv_tokens: int = 0  # KV cache of a node in tokens; 0: no limit
    context: int = 0  # tokens of a typical request; 0: unknown
    use: float = 0.7  # fraction of a step for drafting, above which there are too few nodes
    idle: float = 0.5  # fraction of a step for drafting, below which there are too many nodes
    up_seconds: float = 10.0  # add nodes after too few for this long
    down_seconds: float = 300.0  # remove a node after too many for this long
    # If both prices are set, nodes beyond `least` run only while each earns its cost.
    node_price: float = 0.0  # price per hour of one node
    token_price: float = 0.0  # price per million generated tokens


@dataclass(frozen=True)
class Demand:
    """Demand of one target."""

    requests: float  # running requests
    step_seconds: float  # time of a step


@dataclass(frozen=True)
class NodeSpeed:
    """Measured speed of nodes."""

    level_seconds: float  # time per draft level
    requests: float  # requests per node during the measurement
    acceptance: float | None = None  # acceptance rate of the first level; None: unknown


def requests_served(speed: NodeSpeed, step_seconds: float, rule: ScaleRule, use: float) -> int:
    """Return the number of requests that one node can serve if it may draft for the fraction `use` of a step.

    A level for m requests takes t(m) = t0 (1 + m / doubling). If not even one request fits with run-ahead, the result
    is that without run-ahead; it is at least 1.
    """
    base_seconds = speed.level_seconds / (1 + speed.requests / rule.doubling)  # t0

    def level_seconds(requests: int) -> float:
        return base_seconds * (1 + requests / rule.doubling)

    capacity = max(rule.kv_tokens // rule.context, 1) if rule.kv_tokens and rule.context else UNBOUNDED
    for ahead in (rule.ahead, 1.0):
        served = requests_per_node(DraftWork(rule.levels, step_seconds, ahead, use), level_seconds, capacity)
        if served:
            return served
    return 1


def nodes_needed(demands: Sequence[Demand], speed: NodeSpeed, rule: ScaleRule, use: float) -> int:
    """Return the number of nodes that serve all demands, within the rule's minimum and maximum."""
    nodes = math.ceil(_need(demands, speed, rule, use) - _ROUNDING)
    return min(max(nodes, rule.least), rule.most)


def profitable_nodes(demands: Sequence[Demand], speed: NodeSpeed, rule: ScaleRule, part: float = 1.0) -> int:
    """Return the maximum number of nodes that each earn more than a fraction (`part`) of their price.

    All nodes except the last are fully used, so they earn the same.
    """
    need = _need(demands, speed, rule, rule.use)
    if not (rule.node_price and rule.token_price and need) or speed.acceptance is None:
        return rule.most
    passes_per_second = sum(demand.requests / demand.step_seconds for demand in demands if demand.requests)
    tokens_per_hour = 3600 * gained_tokens(speed.acceptance, rule.levels) * passes_per_second
    earned_per_hour = tokens_per_hour / need * rule.token_price / 1e6  # by a fully used node
    least_use = part * rule.node_price / earned_per_hour if earned_per_hour else math.inf
    full_nodes = math.floor(need + _ROUNDING)
    is_last_profitable = need - full_nodes > least_use  # the last node is not fully used
    profitable = 0 if least_use >= 1 else full_nodes + is_last_profitable
    return min(max(profitable, rule.least), rule.most)


_ROUNDING = 1e-9  # rounding error of `_need`


def _need(demands: Sequence[Demand], speed: NodeSpeed, rule: ScaleRule, use: float) -> float:
    """Return the number of nodes that serve all demands, before rounding."""
    nodes = 0.0
    for demand in demands:
        if demand.requests:
            nodes += demand.requests / requests_served(speed, demand.step_seconds, rule, use)
    return nodes


class Scaler:
    """Adds all missing nodes when some were missing for `up_seconds`; removes one surplus node per `down_seconds`.

    Scaling down uses a lower utilisation than scaling up, so that neither triggers the other.
    """

    def __init__(self, rule: ScaleRule, clock: Callable[[], float] = monotonic) -> None:
        self.rule = rule
        self._clock = clock
        self._few_since: float | None = None  # time since which nodes have been missing; None: enough run
        self._many_since: float | None = (
            None  # time since which too many have been running; None: not too many
        )

    def size(self, have: int, demands: Sequence[Demand], speed: NodeSpeed | None) -> int:
        """Return the number of nodes to run, given that `have` run; unchanged while their speed is unknown."""
        rule, now = self.rule, self._clock()
        bounded = min(max(have, rule.least), rule.most)
        is_idle = not any(demand.requests for demand in demands)
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
    """Return the time since which a condition holds; None: it does not hold. `before` is the previous result."""
    if not holds:
        return None
    return now if before is None else before
