"""A simulated target: its requests and passes."""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from foreword.simulate.chains import Chains, Flags
from foreword.simulate.scenario import Counts, Dice, DraftPlacement, Scenario

if TYPE_CHECKING:  # it imports this module
    from foreword.simulate.world import World

_LEAST_TOKENS = 16  # minimum tokens of an unfinished request that counts in the results


@dataclass
class TargetTally:
    """Totals of a target since the warm-up."""

    tokens: int = 0
    passes: int = 0
    request_passes: int = 0  # sum of requests over the passes
    used: int = 0  # verified draft tokens
    accepted: int = 0  # accepted draft tokens
    waited: float = 0.0  # seconds from a step's start to that of its pass: waiting and local drafting
    token_seconds: list[float] = field(default_factory=list)  # mean time per token of each request
    latencies: list[float] = field(default_factory=list)  # seconds from arrival to end of each request


class SimTarget:
    """A target whose requests all take part in every pass."""

    def __init__(self, scenario: Scenario, zone: int, world: "World", seeds: np.random.SeedSequence) -> None:
        slots = scenario.fleet.batch
        lengths, drafts, nodes = (np.random.default_rng(seed) for seed in seeds.spawn(3))
        self.scenario = scenario
        self.tally = TargetTally()
        self.queue: deque[float] = deque()  # arrival times
        self.is_idle = True
        self._lengths, self._draft_rng = lengths, drafts
        # Arrays by request slot.
        self._live = np.zeros(slots, np.bool_)  # whether a request has the slot
        self._left = np.zeros(slots, np.int64)  # tokens until its answer ends
        self._gained = np.zeros(slots, np.int64)  # tokens of its answer so far
        self._arrived = np.zeros(slots)  # arrival time
        self._began = np.zeros(slots)  # time of its admission
        self._is_remote = scenario.drafting is DraftPlacement.REMOTE
        self._dice = Dice(scenario.kinds, slots)
        self.chains = Chains(scenario, zone, world, self._dice, nodes)

    @property
    def load(self) -> int:
        """Number of running and waiting requests."""
        return int(self._live.sum()) + len(self.queue)

    def step(self, now: float) -> float | None:
        """Run one step; return its end time, or None if idle. A step that ends after the simulation does not count."""
        is_new = self._admit(now)
        live = self._live
        requests = int(live.sum())
        if not requests:
            return None
        costs, scenario = self.scenario.costs, self.scenario
        wants = live & ~is_new
        pass_start = now
        used = np.zeros(len(live), np.int64)
        if scenario.drafting is DraftPlacement.LOCAL and wants.any():
            used = np.where(wants, self._dice.lengths(self._draft_rng, scenario.k), 0)
            level_seconds = costs.local.seconds(int(wants.sum()))
            pass_start = now + costs.local.first + int(used.max()) * level_seconds
        elif self._is_remote:
            used, pass_start = self.chains.levels(now, live, wants)
            pass_start += costs.notifying(requests)
        prompts = int(is_new.sum()) * scenario.traffic.prompt
        end = pass_start + costs.step(requests, int(used.sum()), prompts)
        if end < scenario.seconds:
            self._judge(used, pass_start - now, end)
        return end

    def finish(self, now: float) -> None:
        """Count the requests that have not ended, with their tokens until now."""
        for slot in np.flatnonzero(self._live & (self._gained >= _LEAST_TOKENS)).tolist():
            self._record_token_time(slot, now)

    def _admit(self, now: float) -> Flags:
        """Admit requests until the batch is full; return which slots are new."""
        is_new = np.zeros(len(self._live), np.bool_)
        has_arrivals = bool(self.scenario.traffic.rates)
        for slot in np.flatnonzero(~self._live).tolist():
            if has_arrivals and not self.queue:
                break
            arrived = self.queue.popleft() if has_arrivals else now
            mean = self.scenario.traffic.answer
            # A mean of 1e9 tokens or more stands for answers that do not end.
            length = 1 + int(self._lengths.exponential(max(mean - 1, 0))) if mean < 1e9 else 1 << 40
            self._live[slot], is_new[slot] = True, True
            self._left[slot], self._gained[slot] = length, 0
            self._arrived[slot], self._began[slot] = arrived, now
            if self._is_remote:
                self.chains.open(slot, arrived)
        return is_new

    def _judge(self, used: Counts, waited: float, end: float) -> None:
        """Sample which verified levels are accepted, commit the tokens, and end finished requests.

        `used` are the verified levels by slot, `waited` the seconds from the step's start to that of its pass.
        """
        live, scenario = self._live, self.scenario
        if scenario.drafting is DraftPlacement.PLAIN:
            accepted = used
        else:
            right = self._dice.correct_levels(self._draft_rng)
            accepted = np.minimum(used, right)
            if self._is_remote:
                self.chains.record_verdict(used, right)
        gained = np.where(live, np.minimum(accepted + 1, self._left), 0)
        self._left -= gained
        self._gained += gained
        tokens = int(gained.sum())
        if self._is_remote:
            self.chains.rate.record(tokens, end)
        if end >= scenario.counts_from:
            tally = self.tally
            tally.tokens += tokens
            tally.passes += 1
            tally.request_passes += int(live.sum())
            tally.used += int(used.sum())
            tally.accepted += int(np.where(live, accepted, 0).sum())
            tally.waited += waited
        done = live & (self._left <= 0)
        for slot in np.flatnonzero(done).tolist():
            self._end(slot, end)

    def _end(self, slot: int, now: float) -> None:
        if now >= self.scenario.counts_from:
            self._record_token_time(slot, now)
            self.tally.latencies.append(now - float(self._arrived[slot]))
        self._live[slot] = False
        self._gained[slot] = 0
        self._dice.renew(slot)
        if self._is_remote:
            self.chains.close(slot)

    def _record_token_time(self, slot: int, now: float) -> None:
        """Record the mean time per token of a request until now."""
        self.tally.token_seconds.append(float((now - self._began[slot]) / self._gained[slot]))
