"""Texts to continue, and whoever continues them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class Job:
    """A text to continue."""

    prompt: list[int]  # at least one token
    max_new: int
    temperature: float  # 0: greedy
    on_done: Callable[[list[int]], None]  # gets what was written, the end token included


@dataclass
class Row:
    """A job under way."""

    job: Job
    written: list[int] = field(default_factory=list)


class TextBatch(Protocol):
    """Works on many jobs at a time."""

    tokens_written: int

    def run(self, jobs: Iterator[Job]) -> Iterator[None]:
        """Work on `jobs`, and yield now and then; ends when there is nothing left to do."""
        ...
