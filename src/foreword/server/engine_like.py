"""What the server needs of an engine; `foreword.engine.engine.Engine` is one, tests bring their own."""

from collections.abc import AsyncIterable, Mapping
from typing import Protocol

from foreword.engine.messages import AnswerDelta, NewRequest


class EngineStatsLike(Protocol):
    """How an engine is doing right now."""

    @property
    def running(self) -> int:
        """Answers that the last pass worked on."""
        ...

    @property
    def waiting(self) -> int:
        """Answers that wait for their first pass, or for room to go on."""
        ...

    @property
    def kv_pages(self) -> int:
        """Pages of KV memory that there are."""
        ...

    @property
    def kv_pages_used(self) -> int:
        """Pages that requests hold."""
        ...

    @property
    def drafter_faults(self) -> Mapping[str, int]:
        """By drafter and kind: drafts that were lost because the drafter failed."""
        ...

    @property
    def step_faults(self) -> Mapping[str, int]:
        """By stage: failures that the engine recovered from."""
        ...

    @property
    def acceptance(self) -> Mapping[str, tuple[int, int, int]]:
        """By cohort: drafts, guesses that were judged, guesses that were committed."""
        ...


class EngineLike(Protocol):
    """Answers many requests at once."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        ...

    def submit(self, request: NewRequest) -> AsyncIterable[AnswerDelta]:
        """Start answering; `RequestError` at once for what cannot be answered, `EngineStopped` if it is over.

        The deltas of all n answers come through one stream, which ends with the last of them.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop answering: what is unfinished ends with `finish_reason="abort"`. Unknown ids are ignored."""
        ...

    def speculate(self, on: bool) -> None:
        """Guess ahead or don't, for all requests."""
        ...

    def stats(self) -> EngineStatsLike:
        """How it is doing."""
        ...

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the running ones; False if they did not end in time."""
        ...

    def close(self) -> None:
        """Stop, and give everything back."""
        ...
