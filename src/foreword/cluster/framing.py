"""Length-prefixed frames: what every socket of ours carries, to the engine's process and to draft nodes."""

import struct

from foreword.errors import ForewordError

HEADER = struct.Struct(">I")

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Longest frame: log probabilities of a long prompt fit, a length that is garbage does not."""


class ChannelError(ForewordError):
    """The bytes on the channel are no message; the connection ends."""


def framed(payload: bytes) -> bytes:
    """A frame with this content."""
    return HEADER.pack(len(payload)) + payload


class FrameSplitter:
    """Cuts a stream of bytes into frames."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; return the contents of the frames that are now complete."""
        self._buffer += data
        frames: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, start)
            if length > self._limit:
                raise ChannelError(f"a frame claims {length} bytes, over the limit of {self._limit}")
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[start + HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return frames

    @property
    def inside_frame(self) -> bool:
        """Whether bytes are left over: the other side was cut off in the middle of a frame."""
        return bool(self._buffer)
