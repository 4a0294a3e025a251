"""A drafter that can be made slower, to see what is done about it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

from foreword.drafters.combined import Routed
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask, Drafter, DraftRequest, choices_of, close_all


class Brake:
    """Shared by all drafters of an engine."""

    def __init__(self) -> None:
        self.factor = 1.0

    @contextmanager
    def pulled(self, factor: float) -> Iterator[None]:
        """Every call takes this many times as long meanwhile."""
        self.factor = factor
        try:
            yield
        finally:
            self.factor = 1.0


class SlowedDrafter:
    """Another drafter behind a brake; all but its calls is the other's own."""

    def __init__(
        self,
        drafter: Drafter,
        brake: Brake,
        clock: Callable[[], float] = perf_counter,
        wait: Callable[[float], None] = sleep,
    ) -> None:
        self._drafter = drafter
        self._brake = brake
        self._clock = clock
        self._wait = wait

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        began = self._clock()
        drafts = self._drafter.propose(asks)
        if self._brake.factor > 1:
            self._wait((self._brake.factor - 1) * (self._clock() - began))
        return drafts

    def forget(self, request: DraftRequest) -> None:
        self._drafter.forget(request)

    def close(self) -> None:
        close_all([self._drafter])

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the other has
        return getattr(self._drafter, name)


def slowed(drafter: Drafter, brake: Brake) -> Drafter:
    """A drafter behind a brake; of those that a policy chooses between, each."""
    choices = {name: SlowedDrafter(one, brake) for name, one in choices_of(drafter).items()}
    return Routed(choices) if choices else SlowedDrafter(drafter, brake)
