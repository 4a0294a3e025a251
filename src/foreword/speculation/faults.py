"""What went wrong and was recovered from."""

import logging
from collections import Counter
from types import TracebackType

import torch

_log = logging.getLogger(__name__)


class FaultLog:
    """Counts faults by stage; the first of each stage is logged."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, stage: str, error: BaseException) -> None:
        """Count a fault that cost nobody more than guesses or a try."""
        self.counts[stage] += 1
        if self.counts[stage] == 1:
            trace = None if isinstance(error, torch.OutOfMemoryError) else error  # nobody looks for its place
            _log.error("a %s failed and is recovered from: %s", stage, error, exc_info=trace)

    def forgiven(self, stage: str) -> "_Forgiven":
        """Note what is raised inside, and go on after it."""
        return _Forgiven(self, stage)


class _Forgiven:
    """A context; every step enters several, and one made of a generator takes three times as long."""

    __slots__ = ("_log", "_stage")

    def __init__(self, log: FaultLog, stage: str) -> None:
        self._log, self._stage = log, stage

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self._log.note(self._stage, error)
            return True
        return False
