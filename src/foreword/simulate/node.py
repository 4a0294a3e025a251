"""A draft node: how busy it is, and what is wrong with it."""

from heapq import heappop, heappush
from itertools import count

from foreword.simulate.costs import LevelTimes

SLOW_FACTOR = 10.0
"""How much longer the levels of a slow node take."""

_numbers = count()


class Job:
    """What a node has to do for one target, until its chains are as long as they get."""

    __slots__ = ("requests", "until")

    def __init__(self, requests: int, until: float) -> None:
        self.requests = requests
        self.until = until


class SimNode:
    """Sessions of many targets, drafted for in common rounds."""

    def __init__(self, number: int, zone: int, born: float, ready: float) -> None:
        self.number = number
        self.zone = zone
        self.born = born  # from when on it is paid for
        self.ready = ready  # from when on it drafts
        self.gone: float | None = None  # it was given back
        self.sessions = 0
        self.is_dead = False
        self.silent_since: float | None = None  # for targets of all zones, or of the others
        self.is_partitioned = False
        self.factor = 1.0
        self.busy_seconds = 0.0  # in which it had something to do
        self._busy_until = 0.0
        self._active = 0
        self._jobs: list[tuple[float, int, Job]] = []

    def takes(self, now: float) -> bool:
        """Whether it can be a home."""
        return not self.is_dead and self.gone is None and now >= self.ready and self.silent_since is None

    def is_silent_for(self, zone: int) -> bool:
        return self.silent_since is not None and (not self.is_partitioned or zone != self.zone)

    def level_seconds(self, requests: int, times: LevelTimes, round_batch: int) -> float:
        """One level for all of so many requests: more than a round holds take turns."""
        turns = max(1.0, requests / round_batch)
        return times.seconds(min(requests, round_batch)) * turns * self.factor

    def active(self, now: float) -> int:
        """Requests that it is drafting for."""
        jobs = self._jobs
        while jobs and jobs[0][0] <= now:
            self._active -= heappop(jobs)[2].requests
        return self._active

    def take(self, job: Job, now: float, old: Job | None) -> None:
        """Work for a target, in place of what it had before."""
        if old is not None and old.until > now:
            self._active -= old.requests
            old.requests = 0
        heappush(self._jobs, (job.until, next(_numbers), job))
        self._active += job.requests
        if job.until > self._busy_until:
            self.busy_seconds += job.until - max(now, self._busy_until)
            self._busy_until = job.until
