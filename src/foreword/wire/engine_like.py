"""What the server needs of an engine; `foreword.engine.engine.Engine` is one, tests bring their own."""

from collections.abc import Callable
from typing import Protocol

from foreword.engine.adapters import Adapters
from foreword.engine.messages import EngineStats, NewRequest
from foreword.engine.streams import AnswerStream


class EngineLike(Protocol):
    """Answers many requests at once."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        ...

    def submit(self, request: NewRequest) -> AnswerStream:
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

    def move_pair(self, drafter: str, cohort: str, state: str) -> None:
        """Move a drafter of the policy file in a cohort; what is not in the file is ignored, with a line in the log."""
        ...

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters that requests can ask for; any thread may load and unload them."""
        ...

    def when_dead(self, tell: Callable[[Exception], None]) -> None:
        """Call `tell`, in any thread, if the engine dies by itself; also while it has nothing to do."""
        ...

    def stats(self) -> EngineStats:
        """How it is doing."""
        ...

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the running ones; False if they did not end in time."""
        ...

    def close(self) -> None:
        """Stop, and give everything back."""
        ...
