"""The engine as the HTTP side sees it, wherever it runs."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from foreword.engine.messages import AnswerDelta, EngineStats, NewRequest

OnLate = Callable[[AnswerDelta | Exception], None]
"""Hears the ends of answers that nobody waits for any more, or why there will be none."""


class EngineState(StrEnum):
    """Where the engine stands."""

    STARTING = "starting"  # the model is being loaded for the first time
    READY = "ready"
    RESTARTING = "restarting"  # it has died and a fresh one is being started
    DRAINING = "draining"  # nothing new is taken; what runs may end
    STOPPED = "stopped"


@dataclass(frozen=True)
class EngineLimits:
    """What the loaded engine can take."""

    max_model_len: int  # most tokens of a prompt and its answer together


class EngineClient(Protocol):
    """Takes requests to the engine and its answers back."""

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        ...

    @property
    def restarts(self) -> int:
        """How often the engine died and was started again."""
        ...

    def limits(self) -> EngineLimits:
        """What it can take; `EngineUnavailable` until it has been ready once."""
        ...

    @property
    def speculating(self) -> bool:
        """Whether requests are guessed ahead for: the switch for everybody."""
        ...

    def submit(self, request: NewRequest, on_late: OnLate | None = None) -> AsyncGenerator[AnswerDelta, None]:
        """The deltas of all n answers. They raise `RequestError` if it is refused, `EngineUnavailable` if it dies.

        Closing the iterator before its end aborts the request; `on_late` then hears the ends of its answers.
        """
        ...

    def speculate(self, on: bool) -> None:
        """Guess ahead or don't, for all requests, also after a restart."""
        ...

    def move_pair(self, drafter: str, cohort: str, state: str) -> None:
        """Move a drafter of the policy file in a cohort, from the next step on."""
        ...

    async def set_adapter(self, name: str, path: str | None) -> None:
        """Load a LoRA adapter, or unload it if there is no path, also after a restart.

        Raises `RequestError` for what cannot be loaded, `EngineUnavailable` if there is no engine now.
        """
        ...

    async def stats(self) -> EngineStats | None:
        """How the engine is doing; None if it does not say in time."""
        ...
