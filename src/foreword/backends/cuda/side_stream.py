"""A second stream, whose kernels run at the same time as others; in a captured pass, it is a parallel branch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream that waits for the earlier kernels of the current stream (`fork`), which then waits for it (`join`)."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._is_forked = False

    @contextmanager
    def fork(self, *, is_parallel: bool) -> Iterator[None]:
        """Launch the kernels of a `with` block on the second stream if `is_parallel`, else on the current one."""
        if self._stream is None or not is_parallel:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
        self._is_forked = True

    def join(self) -> None:
        """Let the current stream wait for the second one, if it has been used since the last call."""
        if self._is_forked:
            assert self._stream is not None
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._is_forked = False
