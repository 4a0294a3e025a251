"""Server-sent events, as far as the OpenAI API uses them."""

from collections.abc import Iterator


class EventParser:
    """Cuts a stream of bytes into the data of its events, wherever the network has cut it."""

    MOST_BYTES = 16 * 2**20  # of one event: a server that never ends a line must not fill the memory

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._held = 0  # bytes of the event that is not over yet

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The data of every event that these bytes complete; fields other than data are passed over."""
        if self._held + len(self._rest) + len(received) > self.MOST_BYTES:
            raise ValueError(f"an event of more than {self.MOST_BYTES} bytes")
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            yield from self._take(line.removesuffix(b"\r"))

    def _take(self, line: bytes) -> Iterator[bytes]:
        if not line:
            if self._data:
                yield b"\n".join(self._data)
            self._data, self._held = [], 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._held += len(line) + 1
        elif name not in (b"", b"event", b"id", b"retry"):  # an empty name is a comment
            raise ValueError(f"not a line of an event stream: {line[:60]!r}")
