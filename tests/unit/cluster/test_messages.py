"""The frames between targets and draft nodes: what was sent arrives, and everything else ends the connection."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.cluster import messages as m
from foreword.cluster.framing import ChannelError, FrameSplitter, framed

VOCABULARY = m.VocabularyDigest(300, b"d" * 32)
TO_NODE = [
    m.Hello(1, b"n" * 32, b"p" * 32, 7, VOCABULARY),
    m.Open(3, [1, 2, 3], 2, m.Sampling(300, 0.7, 0.9, 0.1, 20, 1 << 63, [4], [-1.5], [5, 6]), b"t", 0.5, [9]),
    m.Commits([m.SessionCommit(3, 5, [4, 5], 5, 5, 0.1), m.SessionCommit(4, 9, [], 0, 0)]),
    m.Close(3, 6, [7]),
    m.Ping(1),
    m.HandshakeRefusal("no"),
]
FROM_NODE = [
    m.Challenge(1, b"n" * 32),
    m.Welcome(b"p" * 32, 9, VOCABULARY, "ngram", 256, {"host": "a"}),
    m.SessionDrafts(
        [m.SessionDraft(3, 1, 5, True, [7, 8]), m.SessionDraft(4, 2, 9, False, [7, 8, 9], [-1, -1, 0])]
    ),
    m.Lagging(3, 2),
    m.Busy(3, 1.0),
    m.NodeLoad(3, 256, 0.001, 0.5),
    m.NodeDrain(),
    m.Pong(1),
    m.HandshakeRefusal("no"),
]


def content(message) -> bytes:
    (frame,) = FrameSplitter().feed(m.encode(message))
    return frame


@pytest.mark.parametrize("message", TO_NODE, ids=lambda one: type(one).__name__)
def test_what_a_target_says_arrives_as_it_was_sent(message):
    assert m.to_node(content(message)) == message


@pytest.mark.parametrize("message", FROM_NODE, ids=lambda one: type(one).__name__)
def test_what_a_node_says_arrives_as_it_was_sent(message):
    assert m.from_node(content(message)) == message


def test_a_pass_of_64_requests_takes_few_bytes():
    commits = [m.SessionCommit(number, 1000 + number, [5, 6, 7, 8], 5, 5, 0.01) for number in range(64)]
    assert len(m.encode(m.Commits(commits))) < 64 * 40
    guesses = [m.SessionDraft(number, 9, 1000, False, [5, 6, 7, 8, 9]) for number in range(64)]
    assert len(m.encode(m.SessionDrafts(guesses))) < 64 * 25


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_nothing_else_happens(garbage):
    for decode in (m.to_node, m.from_node):
        with pytest.raises(ChannelError):
            decode(garbage)


@given(st.sampled_from(TO_NODE + FROM_NODE), st.integers(0, 400), st.integers(1, 255))
def test_a_damaged_frame_is_known_as_such(message, place, flip):
    frame = bytearray(content(message))
    frame[place % len(frame)] ^= flip
    for decode in (m.to_node, m.from_node):
        with pytest.raises(ChannelError, match="damaged"):
            decode(bytes(frame))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([type(message).__name__ for message in TO_NODE + FROM_NODE])


@given(names, st.lists(anything, max_size=9))
def test_whole_frames_of_wrong_fields_are_refused_or_are_messages(name, fields):
    """With the right checksum and the right name: what gets through is of the declared types and can be sent again."""
    payload = msgspec.msgpack.encode([name, *fields])
    frame = m.HEADER.pack(m.crc32(payload)) + payload
    for decode in (m.to_node, m.from_node):
        try:
            message = decode(frame)
        except ChannelError:
            continue
        assert decode(content(message)) == message or "nan" in repr(message)


@given(st.lists(st.sampled_from(FROM_NODE), max_size=6), st.lists(st.integers(1, 30), min_size=1))
def test_messages_are_found_however_the_stream_is_cut(messages, cuts):
    stream = b"".join(map(m.encode, messages))
    splitter, found, at, turn = FrameSplitter(m.MAX_FRAME_BYTES), [], 0, 0
    while at < len(stream):
        found += splitter.feed(stream[at : at + cuts[turn % len(cuts)]])
        at, turn = at + cuts[turn % len(cuts)], turn + 1
    assert [m.from_node(frame) for frame in found] == messages


@pytest.mark.parametrize(
    "message",
    [
        m.SessionDrafts([m.SessionDraft(1, 1, 1, True, [5] * (m.MAX_NODES + 1))]),
        m.SessionDrafts([m.SessionDraft(1, 1, 1, True, [-1])]),
        m.SessionDrafts([m.SessionDraft(-1, 1, 1, True, [1])]),
        m.Commits([m.SessionCommit(1, 1, [], 1000, 5)]),
        m.HandshakeRefusal("x" * 501),
        m.Busy(1, -1.0),
    ],
    ids=[
        "too many nodes",
        "no token",
        "no session",
        "asks for too much",
        "a long reason",
        "a time that has passed",
    ],
)
def test_numbers_out_of_bounds_end_the_connection(message):
    for decode in (m.to_node, m.from_node):
        with pytest.raises(ChannelError, match="no message"):
            decode(content(message))


def test_an_oversized_frame_is_refused_before_it_is_read():
    with pytest.raises(ChannelError, match="over the limit"):
        FrameSplitter(m.MAX_FRAME_BYTES).feed(m.HEADER.pack(m.MAX_FRAME_BYTES + 1))
    assert framed(b"ab") == b"\0\0\0\2ab"
