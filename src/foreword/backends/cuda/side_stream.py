"""Runs kernels beside others: a second stream, which becomes a parallel branch of a captured pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream that starts after what the current stream has launched, and that the current stream waits for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _new_stream(device) if device.type == "cuda" else None
        self._is_forked = False

    @contextmanager
    def fork(self, beside: bool) -> Iterator[None]:
        """Launch the block's kernels on the second stream if `beside`, else on the current one."""
        if self._stream is None or not beside:
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


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
