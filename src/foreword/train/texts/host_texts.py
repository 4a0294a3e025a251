"""What the rows of an endless batch have written, as far as the host knows."""

import numpy as np

from foreword.train.texts.jobs import Job

NOTHING = -1
"""Stands where a row wrote no token."""


class HostTexts:
    """Texts under way, a row each. Only those that have ended are looked at one by one."""

    def __init__(self, rows: int, context: int, stops: np.ndarray) -> None:
        """`stops` says of every token whether it ends a text."""
        self._stops = stops
        self._jobs: list[Job | None] = [None] * rows
        self._tokens = np.zeros((rows, context), dtype=np.int64)
        self._lengths = np.zeros(rows, dtype=np.int64)
        self._longest = np.zeros(rows, dtype=np.int64)
        self.free = list(range(rows))  # rows without a job

    @property
    def under_way(self) -> int:
        return len(self._jobs) - len(self.free)

    def begin(self, row: int, job: Job) -> None:
        """A job in a row that was taken off `free`."""
        self._jobs[row], self._lengths[row], self._longest[row] = job, 0, job.max_new

    def collect(self, written: np.ndarray) -> int:
        """Take what a stretch [steps, rows] wrote, and hand out the texts that have ended; how many tokens it was."""
        columns = written.T
        rows, steps = (columns != NOTHING).nonzero()  # a row that rests has nothing from there on
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
