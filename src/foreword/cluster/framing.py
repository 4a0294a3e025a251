"""Length-prefixed frames on the sockets of draft nodes and of the engine's process."""

import struct

from foreword.errors import ForewordError

HEADER = struct.Struct(">I")  # length of the payload in bytes, big-endian

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Maximum frame size: large enough for the log-probabilities of a long prompt, small enough to detect damaged frames,
since a random length usually exceeds it."""


class ChannelError(ForewordError):
    """Invalid bytes on a channel; the connection ends."""


def framed(payload: bytes) -> bytes:
    """Return the frame of a payload."""
    return HEADER.pack(len(payload)) + payload


class FrameSplitter:
    """Splits a byte stream into frames."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of the frames that these bytes complete; raise `ChannelError` for one over the limit."""
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
        """Whether the bytes so far end within a frame."""
        return bool(self._buffer)
