"""Jobs of generating training texts, texts in progress, and running jobs on the engine."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from foreword.acceptance.params import SamplingParams
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.errors import RequestError


@dataclass
class Job:
    """A text to continue."""

    prompt: list[int]  # at least one token
    max_new: int
    temperature: float  # 0: greedy
    on_done: Callable[[list[int]], None]  # receives the generated tokens, including the end token


@dataclass
class Row:
    """A job in progress."""

    job: Job
    written: list[int] = field(default_factory=list)


class TextBatch(Protocol):
    """Processes many jobs at a time."""

    tokens_written: int

    def run(self, jobs: Iterator[Job]) -> Iterator[None]:
        """Process jobs; yield regularly, and end when all are finished."""
        ...


NOTHING = -1
"""Marks a row without a token."""


class HostTexts:
    """Texts in progress, one per row; only ended texts are handled one by one."""

    def __init__(self, rows: int, context: int, stops: np.ndarray) -> None:
        """Initialize; `stops` has, per token id, whether it ends a text."""
        self._stops = stops
        self._jobs: list[Job | None] = [None] * rows
        self._tokens = np.zeros((rows, context), dtype=np.int64)
        self._lengths = np.zeros(rows, dtype=np.int64)
        self._longest = np.zeros(rows, dtype=np.int64)
        self.free = list(range(rows))  # rows without a job

    @property
    def in_flight(self) -> int:
        return len(self._jobs) - len(self.free)

    def begin(self, row: int, job: Job) -> None:
        """Start a job in a row that was removed from `free`."""
        self._jobs[row], self._lengths[row], self._longest[row] = job, 0, job.max_new

    def collect(self, written: np.ndarray) -> int:
        """Add generated tokens [steps, rows], report ended texts, and return the number of tokens."""
        columns = written.T
        rows, steps = (columns != NOTHING).nonzero()  # a row without a token stays idle for the rest
        self._tokens[rows, self._lengths[rows] + steps] = columns[rows, steps]
        self._lengths += np.bincount(rows, minlength=len(self._lengths))
        wrote = np.unique(rows)
        last = self._tokens[wrote, self._lengths[wrote] - 1]
        for row in wrote[self._stops[last] | (self._lengths[wrote] == self._longest[wrote])]:
            job, self._jobs[row] = self._jobs[row], None
            self.free.append(int(row))
            if job is not None:
                job.on_done(self._tokens[row, : self._lengths[row]].tolist())
        return len(rows)


class EngineBatch:
    """Runs jobs as engine requests, as many at a time as it has rows."""

    def __init__(self, core: EngineCore, *, rows: int, seed: int = 0) -> None:
        self._core = core
        self._rows = rows
        self._seeds = itertools.count(seed << 32)
        self._numbers = itertools.count()
        self._active: dict[str, Row] = {}
        self.tokens_written = 0

    def run(self, jobs: Iterator[Job]) -> Iterator[None]:
        """Process jobs; yield after every pass."""
        try:
            self._admit(jobs)
            while self._active:
                self._step()
                self._admit(jobs)
                yield
        finally:
            for name in self._active:
                self._core.abort(name)
            self._active.clear()

    def _admit(self, jobs: Iterator[Job]) -> None:
        while len(self._active) < self._rows and (job := next(jobs, None)) is not None:
            name = f"text-{next(self._numbers)}"
            params = SamplingParams(
                temperature=job.temperature, max_tokens=job.max_new, seed=next(self._seeds) % 2**63
            )
            self._core.add(NewRequest(name, tuple(job.prompt), params))
            self._active[name] = Row(job)

    def _step(self) -> None:
        for delta in self._core.step():
            row = self._active[delta.request_id]
            row.written.extend(delta.token_ids)
            self.tokens_written += len(delta.token_ids)
            if delta.finish_reason is None:
                continue
            del self._active[delta.request_id]
            if delta.finish_reason == "error":
                raise RequestError(f"a text could not be written: {delta.error}")
            row.job.on_done(row.written)
