"""An event loop whose clock jumps to the next timer instead of waiting for it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time and last exactly as long as they say."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select: Callable[[float | None], Any] = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            self._now += max(timeout or 0.0, 0.0)
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


def run_in_virtual_time(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
