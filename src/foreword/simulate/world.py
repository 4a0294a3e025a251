"""Runs a simulation: its events (passes, arrivals, failures, autoscaling), and its result."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np

from foreword.cluster.assignment import LOAD_BOUND
from foreword.cluster.pools.scaling import DraftWork, wanted_draft_nodes
from foreword.progress import Progress
from foreword.simulate.chains import SLOW_FACTOR, SimNode
from foreword.simulate.scenario import Autoscale, DraftPlacement, Failure, FailureKind, Scenario
from foreword.simulate.target import SimTarget


@dataclass(frozen=True)
class SimulationResult:
    """Results after the warm-up, over all targets. None: there was nothing to measure."""

    tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_per_target: float
    tokens_per_pass: float | None  # per request
    acceptance: float  # draft tokens accepted / verified
    token_ms_p50: float | None  # mean time per token of a request
    token_ms_p95: float | None
    latency_p50: float | None  # seconds from arrival to end of a request
    latency_p95: float | None
    requests: int  # ended
    waiting_share: float  # fraction of the targets' time from the start of a step to that of its pass
    drafted_per_used: float | None  # drafted levels per verified one
    node_busy_share: float | None
    cost_per_million: float | None  # cost of a million tokens, by the prices of targets and nodes
    moves: int  # requests that changed their node
    waits_in_vain: int
    events: int
    tokens_over_time: tuple[float, ...]  # tokens per second in equal time bins
    nodes_over_time: tuple[int, ...]
    nodes_wanted: int | None  # by the autoscaler, at the end


def result_of(world: "World") -> SimulationResult:
    """Return the result of a simulation that has ended.

    Sums over the whole time are scaled by 0.9, the part after the warm-up.
    """
    scenario, tallies = world.scenario, [target.tally for target in world.targets]
    seconds = scenario.seconds - scenario.counts_from
    tokens = sum(tally.tokens for tally in tallies)
    used, passes = sum(tally.used for tally in tallies), sum(tally.request_passes for tally in tallies)
    token_ms = [1e3 * seconds for tally in tallies for seconds in tally.token_seconds]
    latencies = [seconds for tally in tallies for seconds in tally.latencies]
    end, prices = scenario.seconds, scenario.prices
    node_ends = [end if node.removed_at is None else min(node.removed_at, end) for node in world.nodes]
    node_seconds = sum(node_ends) - sum(node.started_at for node in world.nodes)
    priced_seconds = seconds * len(tallies) * prices.target + 0.9 * node_seconds * prices.node
    busy_seconds = sum(node.busy_seconds for node in world.nodes)
    drafted = sum(target.chains.drafted for target in world.targets)
    return SimulationResult(
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        tokens_per_second_per_target=tokens / seconds / len(tallies),
        tokens_per_pass=tokens / passes if passes else None,
        acceptance=sum(tally.accepted for tally in tallies) / max(used, 1),
        token_ms_p50=_percentile(token_ms, 50),
        token_ms_p95=_percentile(token_ms, 95),
        latency_p50=_percentile(latencies, 50),
        latency_p95=_percentile(latencies, 95),
        requests=len(latencies),
        waiting_share=sum(tally.waited for tally in tallies) / seconds / len(tallies),
        drafted_per_used=0.9 * drafted / used if world.nodes and used else None,
        node_busy_share=busy_seconds / node_seconds if node_seconds else None,
        cost_per_million=priced_seconds / 3600 / tokens * 1e6 if tokens else None,
        moves=sum(target.chains.moves for target in world.targets),
        waits_in_vain=sum(target.chains.waits_in_vain for target in world.targets),
        events=world.events,
        tokens_over_time=tuple(count * len(world.bins) / scenario.seconds for count in world.bins),
        nodes_over_time=tuple(world.node_bins),
        nodes_wanted=world.wanted,
    )


def _percentile(values: list[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


BINS = 60  # time bins of charts
SAMPLE_SECONDS = 1.0  # seconds between checks of the autoscaler
AHEAD = 2.2  # drafted levels per wanted level with run-ahead
_EVENTS_PER_REPORT = 2000  # events between two reports of progress
_DRAWN = 4096  # random numbers drawn at once
_TRIES = 4  # random nodes that are tried before the least loaded one is searched
_STEP_WEIGHT = 0.02  # weight of the newest step in the average of step times


class World:
    """One simulation of a scenario; the same seed gives the same events."""

    def __init__(self, scenario: Scenario) -> None:
        fleet, self.scenario = scenario.fleet, scenario
        world_seed, *seeds = np.random.SeedSequence(scenario.seed).spawn(fleet.targets + 1)
        self._rng = np.random.default_rng(world_seed)
        is_remote = scenario.drafting is DraftPlacement.REMOTE
        nodes = fleet.nodes if is_remote else 0
        self.nodes = [SimNode(number, number % fleet.zones, 0.0, 0.0) for number in range(nodes)]
        self.targets = [
            SimTarget(scenario, number % fleet.zones, self, seed) for number, seed in enumerate(seeds)
        ]
        self.bins = [0] * BINS  # tokens
        self.node_bins = [0] * BINS  # drafting nodes
        self.events = 0
        self.wanted: int | None = None  # number of nodes by the ratio formula, when it was computed last
        self._events: list[tuple[float, int, Callable[[float], None]]] = []  # heap of (time, number, event)
        self._numbers = count()  # tell events at the same time apart
        self._near: dict[int, list[SimNode]] = {}  # usable nodes by zone; cleared when they change
        self._round_trips: list[tuple[float, float]] = []  # drawn in advance: factor and added seconds
        self._step_seconds = 0.0  # exponential moving average
        # Too few (1) or too many (-1) nodes, and the simulated second from which; None: the right number.
        self._imbalance: tuple[int, float] | None = None

    def run(self, on_progress: Progress = lambda done, total: None) -> SimulationResult:
        """Handle all events in order of time; return the result."""
        scenario = self.scenario
        for target in self.targets:
            if not scenario.traffic.rates:
                target.is_idle = False
                self._schedule(0.0, self._pass_event(target))
        if scenario.traffic.rates:
            self._schedule(self._next_arrival(0.0), self._arrive)
        for failure in scenario.failures if self.nodes else ():
            self._schedule(failure.at, self._failure_event(failure))
        if self.nodes:
            self._schedule(0.0, self._sample)
        while self._events and self._events[0][0] < scenario.seconds:
            now, _, event = heappop(self._events)
            event(now)
            self.events += 1
            if self.events % _EVENTS_PER_REPORT == 0:
                on_progress(int(1000 * now / scenario.seconds), 1000)
        for target in self.targets:
            target.finish(scenario.seconds)
        return result_of(self)

    def assign_node(self, zone: int, now: float) -> SimNode | None:
        """Return a random node below its load limit, in the nearest zone that has one."""
        zones = self.scenario.fleet.zones
        for away in range(zones):
            near = self._usable_nodes((zone + away) % zones, now)
            if not near:
                continue
            total = sum(node.sessions for node in near) + 1
            bound = min(math.ceil(LOAD_BOUND * total / len(near)), self.scenario.fleet.capacity)
            tried = (near[int(index)] for index in self._rng.integers(len(near), size=_TRIES))
            free = next((node for node in tried if node.sessions < bound), None)
            if free is not None:
                return free
            least: SimNode = min(near, key=lambda node: node.sessions)
            if least.sessions < self.scenario.fleet.capacity:
                return least
        return None

    def round_trip(self, zone: int, node: SimNode) -> float:
        """Return a log-normal round trip, occasionally much longer."""
        network = self.scenario.network
        base = network.round_trip if zone == node.zone else network.zone_round_trip
        if not network.jitter and not network.tail_chance:
            return base
        if not self._round_trips:
            count, tail = _DRAWN, network.tail_seconds
            factors = np.exp(network.jitter * self._rng.standard_normal(count))
            late = np.where(self._rng.random(count) < network.tail_chance, tail, 0.0)
            self._round_trips = list(zip(factors.tolist(), late.tolist(), strict=True))
        factor, late_by = self._round_trips.pop()
        return base * factor + late_by

    def _schedule(self, time: float, event: Callable[[float], None]) -> None:
        heappush(self._events, (time, next(self._numbers), event))

    def _pass_event(self, target: SimTarget) -> Callable[[float], None]:
        """Return an event that runs a target's step, and schedules itself for the end of the step."""

        def run_step(now: float) -> None:
            before = target.tally.tokens
            end = target.step(now)
            target.is_idle = end is None
            if end is not None:
                self._step_seconds += _STEP_WEIGHT * (end - now - self._step_seconds)
                if target.tally.tokens > before:
                    self.bins[int(end / self.scenario.seconds * BINS)] += target.tally.tokens - before
                self._schedule(end, run_step)

        return run_step

    def _next_arrival(self, now: float) -> float:
        """Return the random time of the next request of the fleet; infinite if the simulation ends before."""
        rates = self.scenario.traffic.rates
        length = self.scenario.seconds / len(rates)  # seconds of each rate
        expected = float(self._rng.exponential())  # mean number of requests from now until the next one
        for number, rate in enumerate(rates, 1):
            most = rate * (number * length - now)  # as `expected`, until this rate ends
            if expected < most:
                return now + expected / rate
            if most > 0:
                expected, now = expected - most, number * length
        return math.inf

    def _arrive(self, now: float) -> None:
        """Give a new request to the less loaded of two random targets, and schedule the next arrival."""
        two = [self.targets[i] for i in self._rng.integers(len(self.targets), size=2).tolist()]
        target = min(two, key=lambda one: one.load)
        target.queue.append(now)
        if target.is_idle:
            target.is_idle = False
            self._schedule(now, self._pass_event(target))
        self._schedule(self._next_arrival(now), self._arrive)

    def _usable_nodes(self, zone: int, now: float) -> list[SimNode]:
        """Return a zone's usable nodes; cached until something changes."""
        if zone not in self._near:
            in_zone = self.nodes[zone :: self.scenario.fleet.zones]
            self._near[zone] = [node for node in in_zone if node.is_usable(now)]
        return self._near[zone]

    def _failure_event(self, failure: Failure) -> Callable[[float], None]:
        """Return an event that breaks nodes, and schedules their repair."""

        def change(nodes: list[SimNode], since: float | None) -> None:
            for node in nodes:
                _set_failure(node, failure.kind, since)
            self._near.clear()

        def break_nodes(now: float) -> None:
            usable = [node for node in self.nodes if node.is_usable(now)]
            broken = sorted(usable, key=lambda node: node.factor)[: failure.nodes]  # slow ones last
            change(broken, now)
            if failure.seconds is not None:
                self._schedule(now + failure.seconds, lambda _: change(broken, None))

        return break_nodes

    def _sample(self, now: float) -> None:
        """Record the number of nodes, let the autoscaler act, and schedule the next sample."""
        scenario = self.scenario
        present = [node for node in self.nodes if node.removed_at is None]
        # The bins until the next sample; at least the current one.
        first = int(now / scenario.seconds * BINS)
        last = int(min(now + SAMPLE_SECONDS, scenario.seconds) / scenario.seconds * BINS)
        for index in range(first, max(last, min(first + 1, BINS))):
            self.node_bins[index] = sum(not node.is_dead and now >= node.ready for node in present)
        if scenario.autoscale is not None and now >= scenario.counts_from:
            self._scale(scenario.autoscale, now, present)
        self._schedule(now + SAMPLE_SECONDS, self._sample)

    def _scale(self, rule: Autoscale, now: float, present: list[SimNode]) -> None:
        """Add or remove nodes if their number has been wrong for as long as the rule says."""
        wanted = self.wanted = min(max(self._wanted(), rule.least), rule.most)
        direction = (wanted > len(present)) - (wanted < len(present))  # 1: too few nodes; -1: too many
        if not direction:
            self._imbalance = None
        elif self._imbalance is None or self._imbalance[0] != direction:
            self._imbalance = (direction, now)
        elif now - self._imbalance[1] >= (rule.up_after if direction > 0 else rule.down_after):
            self._imbalance = None
            for number in range(len(self.nodes), len(self.nodes) + wanted - len(present)):
                self.nodes.append(SimNode(number, number % self.scenario.fleet.zones, now, now + rule.boot))
            for node in present[wanted:]:
                node.removed_at = now
            self._near.clear()
            self._schedule(now + rule.boot, lambda _: self._near.clear())

    def _wanted(self) -> int:
        """Return the number of nodes for the current load, by the ratio formula."""
        scenario = self.scenario
        work = DraftWork(scenario.k, self._step_seconds, AHEAD if scenario.runs_ahead else 1.0)
        requests = sum(min(target.load, scenario.fleet.batch) for target in self.targets)
        return wanted_draft_nodes(requests, work, scenario.costs.node.seconds, scenario.fleet.capacity)


def _set_failure(node: SimNode, kind: FailureKind, since: float | None) -> None:
    """Let a node have a failure since a simulated second; None: end it, but no failure of another kind."""
    has_failed = since is not None
    if kind is FailureKind.KILL:
        node.is_dead = has_failed
    elif kind is FailureKind.SLOW:
        node.factor = SLOW_FACTOR if has_failed else 1.0
    else:
        node.silent_since, node.is_partitioned = since, has_failed and kind is FailureKind.PARTITION
