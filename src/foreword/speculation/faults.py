"""What went wrong and was recovered from."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


class FaultLog:
    """Counts faults by stage; the first of each stage is logged."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, stage: str, error: BaseException) -> None:
        """Count a fault that cost nobody more than guesses or a try."""
        self.counts[stage] += 1
        if self.counts[stage] == 1:
            _log.error("a %s failed and is recovered from: %s", stage, error, exc_info=error)

    @contextmanager
    def forgiven(self, stage: str) -> Iterator[None]:
        """Note what is raised inside, and go on after it."""
        try:
            yield
        except Exception as error:
            self.note(stage, error)
