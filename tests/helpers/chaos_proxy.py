"""A proxy between targets and draft nodes that does to frames what networks do, and worse."""

import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from foreword.cluster.address import NodeAddress, without_delay
from foreword.cluster.framing import FrameSplitter, framed

HANDSHAKE = 1
"""Frames of each direction that are left alone: without them nothing would begin."""


class _Cut(Exception):  # noqa: N818 - no error: it is what the proxy wants
    """The connection is to end here."""


class ChaosProxy:
    """Passes frames on, except where a fault is chosen for one. The same seed chooses the same faults."""

    def __init__(self, node: NodeAddress, faults: dict[str, float], seed: int = 0) -> None:
        """`faults` are chances by name: delay, drop, double, reorder, truncate, corrupt."""
        self._node = node
        self._faults = faults
        self._seed = seed
        self._connections = 0
        self.done: dict[str, int] = dict.fromkeys(faults, 0)
        self.frames = 0
        self.is_partitioned = False  # nothing gets through, and nobody is told
        self.spoil: Callable[[bytes], bytes] | None = (
            None  # makes the bytes that targets get of a node's frame
        )
        self._may_pass = threading.Event()
        self._may_pass.set()
        self._listening = NodeAddress("127.0.0.1", 0).listen()
        self.address = NodeAddress("127.0.0.1", 0).bound(self._listening)
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Pass nothing on until `release`, as if the node had stopped; connections stay open and no byte is lost."""
        self._may_pass.clear()

    def release(self) -> None:
        """Pass on what was held, and everything after it."""
        self._may_pass.set()

    def close(self) -> None:
        self.release()
        for one in (self._listening, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def cut(self) -> None:
        """End all connections; new ones are let through."""
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                target, _ = self._listening.accept()
            except OSError:
                return
            try:
                node = self._node.connect(5.0)
            except OSError:
                target.close()
                continue
            for one in (target, node):
                one.settimeout(None)
                without_delay(one)
            self._sockets += [target, node]
            self._connections += 1
            for number, (source, sink) in enumerate(((target, node), (node, target))):
                rng = random.Random(f"{self._seed}/{self._connections}/{number}")
                given = (source, sink, rng, source is node)
                threading.Thread(target=self._pass_on, args=given, daemon=True).start()

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, rng: random.Random, is_nodes: bool
    ) -> None:
        splitter, passed = FrameSplitter(), 0
        held: list[bytes] = []
        try:
            while data := source.recv(1 << 16):
                for frame in splitter.feed(data):
                    passed += 1
                    self.frames += 1
                    self._may_pass.wait()
                    if self.is_partitioned:
                        continue
                    if passed <= HANDSHAKE + 1:
                        sink.sendall(framed(frame))
                    elif is_nodes and self.spoil is not None:
                        sink.sendall(self.spoil(frame))
                    else:
                        self._mistreat(frame, held, sink.sendall, rng)
        except (OSError, _Cut):
            pass
        finally:
            for one in (source, sink):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()

    def _mistreat(
        self, frame: bytes, held: list[bytes], send: Callable[[bytes], None], rng: random.Random
    ) -> None:
        fault = next((name for name, chance in self._faults.items() if rng.random() < chance), "")
        if fault:
            self.done[fault] += 1
        if fault == "reorder" and not held:
            held.append(frame)  # it comes after the next one
            return
        if fault == "truncate":
            send(struct.pack(">I", len(frame)) + frame[: len(frame) // 2])
            raise _Cut
        if fault == "corrupt":
            place = rng.randrange(len(frame))
            frame = frame[:place] + bytes([frame[place] ^ 1 << rng.randrange(8)]) + frame[place + 1 :]
        if fault == "delay":
            time.sleep(rng.random() * 0.01)
        for _ in range(0 if fault == "drop" else 2 if fault == "double" else 1):
            send(framed(frame))
        while held:
            send(framed(held.pop()))
