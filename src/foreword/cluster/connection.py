"""A connection after its handshake: any thread sends, one thread receives."""

import selectors
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from time import monotonic
from typing import Generic, TypeVar

from foreword.cluster.framing import ChannelError, FrameSplitter
from foreword.cluster.messages import MAX_FRAME_BYTES, FromNode, ToNode, encode

SILENCE = 30.0  # seconds without data after which a connection ends; targets send pings more often
TICK = 1.0  # maximum seconds between periodic tasks
MAX_UNSENT = 2 * MAX_FRAME_BYTES  # number of unsent bytes beyond which a connection ends

_READ_BYTES = 1 << 18
_Received = TypeVar("_Received")


class Connection(Generic[_Received]):
    """Sends messages without waiting, and delivers received ones.

    A connection ends if the peer does not read, is silent, or sends an invalid message. `run` returns the reason.
    """

    def __init__(
        self,
        connected: socket.socket,
        decode: Callable[[bytes], _Received],
        *,
        clock: Callable[[], float] = monotonic,
        max_unsent: int = MAX_UNSENT,
    ) -> None:
        """Take over a connected socket; `decode` returns the message in a frame, or raises `ChannelError`."""
        connected.setblocking(False)
        self._socket = connected
        self._decode = decode
        self._clock = clock
        self._max_unsent = max_unsent
        self._splitter = FrameSplitter(MAX_FRAME_BYTES)
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._lock = Lock()  # guards the unsent bytes
        # TLS sockets allow neither concurrent reading and writing nor partial writes.
        self._sends_at_once = not isinstance(connected, ssl.SSLSocket)
        # A byte from writer to reader wakes the receiving thread.
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._end_reason: str | None = None  # why the connection ended; None: it is open
        self._received_at = clock()  # time of the last received data

    @property
    def is_open(self) -> bool:
        return self._end_reason is None

    def send(self, message: ToNode | FromNode) -> bool:
        """Send or queue a message, without waiting; return False if the connection has ended."""
        data, sent = encode(message), 0
        with self._lock:
            if self._end_reason is not None:
                return False
            if self._sends_at_once and not self._unsent:
                try:
                    sent = self._socket.send(data)
                except (BlockingIOError, InterruptedError):
                    pass
                except OSError as error:
                    self._end_reason = f"it hung up ({error})"
                if sent == len(data):
                    return True
            self._unsent.append(memoryview(data)[sent:])
            self._unsent_bytes += len(data) - sent
            if self._unsent_bytes > self._max_unsent:
                self._end_reason = f"it does not read: {self._unsent_bytes} bytes wait for it"
        self._wake()
        return self.is_open

    def close(self, reason: str = "closed") -> None:
        """End the connection; `run` returns the reason."""
        with self._lock:
            self._end_reason = self._end_reason or reason
        self._wake()

    def run(self, on_message: Callable[[_Received], None], on_tick: Callable[[], None]) -> str:
        """Send and deliver messages until the connection ends; return why. At least every `TICK` s, call `on_tick`."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                selector.register(self._wake_reader, selectors.EVENT_READ)
                while self._end_reason is None:
                    writes = selectors.EVENT_WRITE if self._unsent else 0
                    selector.modify(self._socket, selectors.EVENT_READ | writes)
                    selector.select(TICK)
                    with suppress(
                        OSError
                    ):  # nothing to read: the peer's data or the timeout woke the selector
                        self._wake_reader.recv(4096)
                    self._flush()
                    for frame in self._read():
                        on_message(self._decode(frame))
                    if self._clock() - self._received_at > SILENCE:
                        raise ChannelError(f"nothing was heard of it for {SILENCE:g} s")
                    on_tick()
        except ChannelError as error:
            self.close(str(error))
        except OSError as error:
            self.close(f"it hung up ({error})")
        finally:
            self.close("it was given up")
            with self._lock:
                self._unsent.clear()
                for end in (self._socket, self._wake_reader, self._wake_writer):
                    end.close()
        return self._end_reason or ""

    def _read(self) -> list[bytes]:
        """Return the complete frames that have arrived."""
        frames: list[bytes] = []
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return frames
            if not data:
                inside = " in the middle of a frame" if self._splitter.inside_frame else ""
                self.close(f"it hung up{inside}")
                return frames
            self._received_at = self._clock()
            frames += self._splitter.feed(data)
            if len(data) < _READ_BYTES and self._sends_at_once:
                return frames

    def _flush(self) -> None:
        """Send as many unsent bytes as the socket takes now."""
        with self._lock:
            while self._unsent:
                data = self._unsent[0]
                try:
                    sent = self._socket.send(data)
                except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return
                self._unsent_bytes -= sent
                if sent < len(data):
                    self._unsent[0] = data[sent:]
                else:
                    self._unsent.popleft()

    def _wake(self) -> None:
        """Wake the receiving thread, so that it sends unsent bytes or ends."""
        with suppress(OSError):  # the thread is awake already, or has ended
            self._wake_writer.send(b"x")
