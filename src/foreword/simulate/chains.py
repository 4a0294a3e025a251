"""Simulates draft nodes, and the times at which the levels of their chains arrive at a target."""

from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foreword.cluster.assignment import MoveBudget
from foreword.cluster.waiting import (
    LATE_FACTOR,
    ExpectedArrival,
    TokenRate,
    best_wait_seconds,
    longest_wait_seconds,
)
from foreword.simulate.scenario import Counts, Dice, LevelTimes, Scenario, WaitRule

if TYPE_CHECKING:  # it imports this module
    from foreword.simulate.world import World

SLOW_FACTOR = 10.0  # factor by which a slow node's levels take longer

_numbers = count()  # of jobs, which tell equal entries of a heap apart


@dataclass(slots=True)
class DraftJob:
    """A node's work for one target, until its chains reach their maximum length."""

    requests: int
    until: float  # simulated second at which the chains reach their maximum length


@dataclass(eq=False)
class SimNode:
    """A node that drafts for requests of many targets in common rounds."""

    number: int
    zone: int
    started_at: float  # simulated second from which it costs money
    ready: float  # simulated second from which it drafts
    removed_at: float | None = None
    sessions: int = 0  # assigned requests
    is_dead: bool = False
    silent_since: float | None = None  # None: it answers. A partitioned node is silent for other zones only.
    is_partitioned: bool = False
    factor: float = 1.0  # by which its levels take longer
    busy_seconds: float = 0.0
    _busy_until: float = 0.0
    _active: int = 0  # requests of the jobs that have not ended
    _jobs: list[tuple[float, int, DraftJob]] = field(default_factory=list)  # heap of (end, number, job)

    def is_usable(self, now: float) -> bool:
        """Return whether requests may be assigned to it."""
        is_absent = self.is_dead or self.removed_at is not None or self.silent_since is not None
        return not is_absent and now >= self.ready

    def is_silent_for(self, zone: int) -> bool:
        """Return whether the targets of this zone receive no answers from it."""
        return self.silent_since is not None and (not self.is_partitioned or zone != self.zone)

    def level_seconds(self, requests: int, times: LevelTimes, round_batch: int) -> float:
        """Return the seconds of one level for these requests; if a round cannot hold them, they take turns."""
        turns = max(1.0, requests / round_batch)
        return times.seconds(min(requests, round_batch)) * turns * self.factor

    def active(self, now: float) -> int:
        """Return the number of requests for which the node is drafting."""
        jobs = self._jobs
        while jobs and jobs[0][0] <= now:
            self._active -= heappop(jobs)[2].requests
        return self._active

    def take(self, job: DraftJob, now: float, old: DraftJob | None) -> None:
        """Start a job for a target, instead of the target's previous job `old`."""
        if old is not None and old.until > now:
            self._active -= old.requests
            old.requests = 0
        heappush(self._jobs, (job.until, next(_numbers), job))
        self._active += job.requests
        if job.until > self._busy_until:
            self.busy_seconds += job.until - max(now, self._busy_until)
            self._busy_until = job.until


SILENCE = 30.0  # seconds after which a silent node counts as gone (`cluster/connection.py`)
NO_NODE = -1
_DRAWN = 256  # random numbers drawn at once
_SHORTEST = 1e-9  # seconds per level of a lookup, whose levels arrive together

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Chains:
    """Draft chains of a target's requests. They grow on their nodes while the target verifies.

    All arrays are by request slot. Level l (from 1) of a chain arrives at `first_at + (l - 1) * pace`, except the first
    `base` levels, which have arrived already. The chain ends with level `cap`.
    """

    def __init__(
        self, scenario: Scenario, zone: int, world: "World", dice: Dice, rng: np.random.Generator
    ) -> None:
        slots = scenario.fleet.batch
        self._scenario = scenario
        self._zone = zone
        self._world = world
        self._dice = dice
        self._rng = rng
        self._node_of: list[int] = [NO_NODE] * slots
        self._ready = np.zeros(
            slots
        )  # second from which the node can draft, since it has processed the prompt
        self._base = np.zeros(slots, np.int64)  # levels
        self._cap = np.zeros(slots, np.int64)  # levels
        self._first_at = np.zeros(slots)  # simulated second
        self._pace = np.full(slots, 1.0)  # seconds per level
        self._continues = np.zeros(
            slots, np.bool_
        )  # whether the levels after the verified ones are still valid
        self._consumed = np.zeros(slots, np.int64)  # levels that the verdict removes from the chain
        self._counted_levels = np.zeros(slots, np.int64)  # levels of the chain that `drafted` includes
        self._moves = MoveBudget(0.0)
        self._jobs: dict[int, DraftJob] = {}
        self._awaited_silent: set[int] = set()  # numbers of silent nodes for which a pass has waited once
        self.rate = TokenRate()  # of committed tokens
        self._chances: list[float] = []  # random numbers drawn in advance
        self.drafted = 0  # levels that have arrived
        self.moves = 0  # requests that got another node
        self.waits_in_vain = 0  # waits of a pass for a silent node
        # Levels of the longest chain. Running ahead: the verified levels, the target's token, and the next draft.
        self._most = 2 * scenario.k + 1 if scenario.runs_ahead else scenario.k

    @property
    def assigned_nodes(self) -> list[int]:
        """Numbers of the nodes of all requests that have one."""
        return [node_number for node_number in self._node_of if node_number != NO_NODE]

    def close(self, slot: int) -> None:
        """End a session."""
        if self._node_of[slot] != NO_NODE:
            self._world.nodes[self._node_of[slot]].sessions -= 1
        self._node_of[slot] = NO_NODE

    def levels(self, now: float, live: Flags, wants: Flags) -> tuple[Counts, float]:
        """Notify the nodes of the last commits; return each request's draft levels, and when the pass starts.

        `live` are the slots with a request, `wants` those whose requests may have drafts.
        """
        notified, silent, trips, paces, round_ends = self._notify_nodes(now, live)
        self._advance(now, notified, trips, paces, round_ends)
        start = self._start_time(now, notified & wants, silent, trips)
        return np.where(wants, np.minimum(self._arrived(start), self._scenario.k), 0), start

    def record_verdict(self, used: Counts, right: Counts) -> None:
        """Record how many levels were verified (`used`), and how many levels of the chain are correct (`right`).

        A chain continues if the verified levels are correct and the level after them is the target's token.
        """
        self._continues = right > used
        self._consumed = used + 1

    def open(self, slot: int, now: float) -> None:
        """Open a session for a request, whose node starts to process the prompt."""
        node = self._world.assign_node(self._zone, now)
        self._node_of[slot] = NO_NODE if node is None else node.number
        self._continues[slot] = False
        self._cap[slot] = self._base[slot] = self._counted_levels[slot] = 0
        if node is not None:
            node.sessions += 1
            self._ready[slot] = now + self._scenario.traffic.prompt * self._scenario.costs.node_prompt

    def _is_lost(self, node: SimNode, now: float) -> bool:
        """Return whether the target knows that the node is gone: dead, removed, or silent for too long."""
        if node.is_dead or node.removed_at is not None:
            return True
        since = node.silent_since
        return since is not None and node.is_silent_for(self._zone) and now - since > SILENCE

    def _notify_nodes(self, now: float, live: Flags) -> tuple[Flags, Flags, Floats, Floats, Floats]:
        """Notify every node of the commits, and assign new nodes to requests whose node is lost.

        Return for each request whether its node was notified, whether its node is silent, and in seconds: the round
        trip, the time per level, and the time until the node's current round ends.
        """
        slots = len(self._node_of)
        notified, silent = [False] * slots, [False] * slots
        times = [(0.0, 1.0, 0.0)] * slots
        groups: dict[int, list[int]] = {}
        assigned = len(self.assigned_nodes)
        for slot, is_live in enumerate(live.tolist()):
            if not is_live:
                continue
            node_number = self._node_of[slot]
            if node_number != NO_NODE and self._is_lost(self._world.nodes[node_number], now):
                self.close(slot)
                node_number, self._cap[slot] = NO_NODE, 0
            # `MoveBudget` limits how many requests per second get another node.
            if node_number == NO_NODE and self._moves.take(now, assigned):
                self.open(slot, now)
                node_number = self._node_of[slot]
                self.moves += node_number != NO_NODE
            if node_number != NO_NODE:
                groups.setdefault(node_number, []).append(slot)
        for node_number, slots_of_node in groups.items():
            node = self._world.nodes[node_number]
            if node.is_silent_for(self._zone):
                for slot in slots_of_node:
                    silent[slot] = True
                continue
            self._awaited_silent.discard(node_number)
            timing = self._request_drafts(node, len(slots_of_node), now)
            for slot in slots_of_node:
                notified[slot], times[slot] = True, timing
        trips, paces, round_ends = np.array(times).T
        return np.array(notified), np.array(silent), trips, paces, round_ends

    def _request_drafts(self, node: SimNode, requests: int, now: float) -> tuple[float, float, float]:
        """Start a node's job for this many requests.

        Return the seconds of the round trip, per level, and until the node's current round ends.
        """
        scenario, old = self._scenario, self._jobs.get(node.number)
        busy = node.active(now)
        others = busy - (old.requests if old is not None and old.until > now else 0)
        fleet, times = scenario.fleet, scenario.costs.node
        pace = max(node.level_seconds(others + requests, times, fleet.round_batch), _SHORTEST)
        trip = self._world.round_trip(self._zone, node)
        round_end = pace * self._chance() if busy else 0.0
        until = now + trip / 2 + times.first + round_end + self._most * pace
        self._jobs[node.number] = job = DraftJob(requests, until)
        node.take(job, now, old)
        return trip, pace, round_end

    def _chance(self) -> float:
        """Return a random number from 0 to 1."""
        if not self._chances:
            self._chances = self._rng.random(_DRAWN).tolist()
        return self._chances.pop()

    def _advance(self, now: float, notified: Flags, trips: Floats, paces: Floats, round_ends: Floats) -> None:
        """Shift the chains that continue by the committed tokens; restart the others.

        A continuing chain grows on if it has not reached its end, and otherwise is resumed a round trip later.
        """
        arrived = self._arrived(now)
        self.drafted += int(np.maximum(arrived - self._counted_levels, 0).sum())
        continues = self._continues
        left = np.where(continues, np.maximum(arrived - self._consumed, 0), 0)
        restarted = (
            np.maximum(now, self._ready) + trips + self._scenario.costs.node.first + round_ends + paces
        )
        # The next level, number `left` + 1, arrives a round trip and a level's time from now.
        resumed = now + trips + paces * (1 - left)
        is_growing = continues & (arrived < self._cap)
        shifted = self._first_at + self._consumed * self._pace
        first_at = np.where(is_growing, shifted, np.where(continues, resumed, restarted))
        self._first_at = np.where(notified, first_at, self._first_at)
        self._pace = np.where(notified & ~is_growing, paces, self._pace)
        self._base = self._counted_levels = left
        most = self._dice.lengths(self._rng, self._most)
        self._cap = np.where(notified, np.maximum(most, left), left)

    def _arrived(self, now: float) -> Counts:
        """Return how many levels of each chain have arrived."""
        # 1e-9: a level that is due now has arrived, whatever the rounding.
        due: Counts = np.floor((now - self._first_at) / self._pace + (1 + 1e-9)).astype(np.int64)
        return np.minimum(np.maximum(due, self._base), self._cap)

    def _start_time(self, now: float, notified: Flags, silent: Flags, trips: Floats) -> float:
        """Return when the pass starts, after a possible wait for drafts."""
        waiting, k = self._scenario.waiting, self._scenario.k
        if waiting is WaitRule.ALL:
            wanted = np.minimum(self._cap, k)
            last = (self._first_at + (wanted - 1) * self._pace)[notified & (wanted > self._base)]
            return max(now, float(last.max())) if len(last) else now
        rate = self.rate.per_second
        if waiting is WaitRule.NONE or rate is None:
            return now
        arrivals = self._expected_arrivals(now, notified, trips)
        silent_nodes = self._arrivals_of_silent(silent)
        expected = [*arrivals, *silent_nodes.values()]
        if silent_nodes and best_wait_seconds(expected, rate) > 0:
            self._awaited_silent |= set(silent_nodes)
            self.waits_in_vain += len(silent_nodes)
            return now + longest_wait_seconds(expected, rate)
        return now + best_wait_seconds(arrivals, rate)

    def _expected_arrivals(self, now: float, notified: Flags, trips: Floats) -> list[ExpectedArrival]:
        """Return the expected arrivals of levels; equal ones are grouped."""
        k, costs, survival = self._scenario.k, self._scenario.costs.node, self._dice.chances
        arrived = np.minimum(self._arrived(now), k)
        seconds_to_next = self._first_at + arrived * self._pace - now
        wanted = np.minimum(self._cap, k)
        rows = zip(
            (notified & (self._ready <= now) & (arrived < wanted)).tolist(),
            arrived.tolist(),
            wanted.tolist(),
            seconds_to_next.tolist(),
            self._pace.tolist(),
            trips.tolist(),
            strict=True,
        )
        groups = Counter(
            (at_hand, most, first, pace, LATE_FACTOR * (trip + costs.first + 2 * pace))
            for is_coming, at_hand, most, first, pace, trip in rows
            if is_coming
        )
        return [
            ExpectedArrival(requests, at_hand, most, survival, first, pace, late)
            for (at_hand, most, first, pace, late), requests in groups.items()
        ]

    def _arrivals_of_silent(self, silent: Flags) -> dict[int, ExpectedArrival]:
        """Return the expected arrivals from nodes whose silence the target has not noticed, by node."""
        k, costs, survival = self._scenario.k, self._scenario.costs.node, self._dice.chances
        level = max(costs.level, _SHORTEST)
        usual = self._scenario.network.round_trip + costs.first + level
        late = LATE_FACTOR * (usual + level)
        requests_of = Counter(self._node_of[slot] for slot in np.flatnonzero(silent).tolist())
        return {
            number: ExpectedArrival(requests, 0, k, survival, usual, level, late)
            for number, requests in requests_of.items()
            if number not in self._awaited_silent
        }
