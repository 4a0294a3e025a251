"""One connection: nobody who sends ever waits, and who misbehaves is hung up on with one line."""

import socket
import threading
from collections.abc import Iterator

import pytest

from foreword.cluster.connection import SILENCE, Connection
from foreword.cluster.framing import HEADER, FrameSplitter
from foreword.cluster.messages import (
    MAX_FRAME_BYTES,
    Close,
    Ping,
    Pong,
    SessionDraft,
    SessionDrafts,
    encode,
    to_node,
)
from helpers.clocks import ScriptedClock


class World:
    """A connection that runs, and the other end of its socket."""

    def __init__(self, **options: object) -> None:
        ours, self.other = socket.socketpair()
        self.clock = ScriptedClock()
        self.connection = Connection(ours, to_node, clock=self.clock, **options)
        self.heard: list[object] = []
        self.reason = ""
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.reason = self.connection.run(self.heard.append, lambda: None)

    def start(self) -> "World":
        self._thread.start()
        return self

    def end(self) -> str:
        """Why it has ended."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.reason


@pytest.fixture
def world() -> Iterator[World]:
    one = World().start()
    yield one
    one.connection.close()
    one.end()
    one.other.close()


def test_messages_go_both_ways(world: World):
    assert world.connection.send(Pong(1))
    assert world.other.recv(100) == encode(Pong(1))
    world.other.sendall(encode(Ping(1)) + encode(Ping(2)))
    world.other.shutdown(socket.SHUT_WR)
    assert world.end() == "it hung up"
    assert world.heard == [Ping(1), Ping(2)]
    assert not world.connection.send(Pong(2))


def test_what_is_too_much_for_the_socket_goes_out_when_the_other_side_reads(world: World):
    messages = [SessionDrafts([SessionDraft(number, 1, 1, True, [7] * 100)] * 200) for number in range(40)]
    for message in messages:
        assert world.connection.send(message)
    expected, got = b"".join(map(encode, messages)), b""
    while len(got) < len(expected):
        got += world.other.recv(1 << 16)
    assert got == expected


def test_a_side_that_does_not_read_is_hung_up_on():
    world = World(max_unsent=100_000).start()
    message = SessionDrafts([SessionDraft(1, 1, 1, True, [7] * 100)] * 200)
    sent = len(encode(message))
    while world.connection.send(message):
        sent += len(encode(message))
    assert sent < 8_000_000  # what the system's own buffers take, and what is kept here
    assert "does not read" in world.end()
    world.other.close()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (HEADER.pack(MAX_FRAME_BYTES + 1), "over the limit"),
        (encode(Ping(1))[:-1], "in the middle of a frame"),
        (encode(Ping(1))[:-1] + b"\xff", "damaged"),
        (encode(Pong(1)), "no message"),
    ],
    ids=["oversized", "truncated", "corrupted", "of the other side"],
)
def test_what_is_no_message_ends_it(world: World, said: bytes, why: str):
    world.other.sendall(said)
    world.other.shutdown(socket.SHUT_WR)
    assert why in world.end()


def test_a_side_of_which_nothing_is_heard_is_given_up():
    """Half open: the other machine is gone, and nobody has said so."""
    world = World()
    world.clock.pass_by(SILENCE + 1)
    assert f"nothing was heard of it for {SILENCE:g} s" in world.start().end()
    world.other.close()


def test_many_threads_may_send_at_once(world: World):
    def send(number: int) -> None:
        for _ in range(50):
            world.connection.send(Pong(number))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    splitter, frames = FrameSplitter(), 0
    while frames < 200:
        frames += len(splitter.feed(world.other.recv(4096)))
    for thread in threads:
        thread.join()


def test_closing_while_it_runs_ends_it(world: World):
    world.connection.close("enough")
    assert world.end() == "enough"
    assert to_node(FrameSplitter().feed(encode(Close(1)))[0]) == Close(1)
