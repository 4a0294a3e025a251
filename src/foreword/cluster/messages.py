"""What targets and draft nodes say to each other.

Frames hold a checksum and msgpack that decodes into the types below, or the connection ends. Whatever is lost, doubled
or late does no harm: lengths are absolute, a session's number is never used again, and drafts are only proposals.
"""

from typing import Annotated, TypeVar
from zlib import crc32

import msgspec
import numpy as np

from foreword.acceptance.request import RECORD, DraftSampling
from foreword.acceptance.rules.rule import Rule
from foreword.cluster.framing import HEADER, ChannelError, framed

VERSION = 1
"""Of the protocol: both sides must have the same."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Longest frame after the handshake: a prompt of millions of tokens."""

MAX_NODES = 128
"""Nodes of a draft, run-ahead included."""

Line = Annotated[str, msgspec.Meta(max_length=500)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Seconds = NonNegative


class NodeMessage(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of all messages: an array that begins with the class's name."""


class VocabularyDigest(msgspec.Struct, array_like=True, frozen=True):
    """What token ids mean: their number, and a digest of all of them in order."""

    size: Count
    digest: Annotated[bytes, msgspec.Meta(max_length=32)]


class Challenge(NodeMessage, frozen=True):
    """From a node, first of all."""

    version: int
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]


class Hello(NodeMessage, frozen=True):
    """From a target: who it is, and that it knows the cluster's token."""

    version: int
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
    proof: Annotated[bytes, msgspec.Meta(max_length=64)]
    incarnation: Count  # another number after every start
    vocabulary: VocabularyDigest


class Welcome(NodeMessage, frozen=True):
    """From a node: the same of itself, and what it can do."""

    proof: Annotated[bytes, msgspec.Meta(max_length=64)]
    incarnation: Count
    vocabulary: VocabularyDigest
    method: Line
    capacity: Count  # sessions at once
    labels: Annotated[dict[Line, Line], msgspec.Meta(max_length=16)] = {}  # host, rack, zone


class HandshakeRefusal(NodeMessage, frozen=True, tag="Refused"):
    """From either side, last of all: why."""

    reason: Line


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """How the request draws, as far as a drafter can follow. There is no seed: what noise starts from is enough."""

    vocab_size: Count
    temperature: NonNegative = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: Count = 0
    stem: Annotated[int, msgspec.Meta(ge=0)] = 0
    bias_ids: list[Token] = []
    bias_values: list[float] = []
    allowed_ids: list[Token] | None = None


class Open(NodeMessage, frozen=True):
    """From a target: a request that needs drafts. The same one again changes nothing."""

    session: Count  # no other session of this connection ever has the same
    tokens: list[Token]  # committed
    prompt_len: Count
    sampling: Sampling
    tenant: Annotated[bytes, msgspec.Meta(max_length=32)] = b""  # a hash: nothing is shared between tenants
    value: float = 0.0  # of one token, in seconds of this target
    prediction: list[Token] = []


class SessionCommit(msgspec.Struct, array_like=True, frozen=True):
    """A session's text as it is now, and how much to draft."""

    session: Count
    length: Count  # of the whole text
    tokens: list[Token]  # the newest of it
    nodes: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)]  # wanted; 0: none for now
    depth: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)]
    value: float = 0.0  # of one token, in seconds of this target


class Commits(NodeMessage, frozen=True):
    """From a target, once for every pass: all of its sessions on this node."""

    commits: list[SessionCommit]


class SessionDraft(msgspec.Struct, array_like=True, frozen=True):
    """The whole draft after the text of this length; it replaces earlier drafts."""

    session: Count
    number: Count  # grows with every draft of the session
    length: Count
    is_all: bool  # nothing is added until the text grows
    tokens: Annotated[list[Token], msgspec.Meta(max_length=MAX_NODES)]
    parents: Annotated[list[int], msgspec.Meta(max_length=MAX_NODES)] = []  # empty: a chain


class SessionDrafts(NodeMessage, frozen=True, tag="Guesses"):
    """From a node, as levels come."""

    drafts: list[SessionDraft]


class Lagging(NodeMessage, frozen=True, tag="Behind"):
    """From a node: it lacks a part of the session's text; length 0: all of it."""

    session: Count
    length: Count  # of the text that it has


class Close(NodeMessage, frozen=True):
    """From a target: the request has ended, or is assigned to another node."""

    session: Count
    length: Count = 0  # of the whole text, with `tokens` its newest; drafters learn from ended answers
    tokens: list[Token] = []


class Busy(NodeMessage, frozen=True):
    """From a node: it takes the session no more, for others are worth more."""

    session: Count
    retry_seconds: Seconds


class NodeLoad(NodeMessage, frozen=True, tag="Load"):
    """From a node, now and then."""

    sessions: Count
    capacity: Count
    level_seconds: Seconds
    busy_share: float


class NodeDrain(NodeMessage, frozen=True, tag="Drain"):
    """From a node: it is leaving and takes no new sessions."""


class Ping(NodeMessage, frozen=True):
    """From a target: answer with `Pong` of the same number."""

    number: Count


class Pong(NodeMessage, frozen=True):
    """From a node."""

    number: Count


ToNode = Hello | HandshakeRefusal | Open | Commits | Close | Ping
FromNode = (
    Challenge | Welcome | HandshakeRefusal | SessionDrafts | Lagging | Busy | NodeLoad | NodeDrain | Pong
)
_Kind = TypeVar("_Kind")

_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_from_node = msgspec.msgpack.Decoder(FromNode)


def encode(message: ToNode | FromNode) -> bytes:
    payload = _encoder.encode(message)
    if len(payload) + HEADER.size > MAX_FRAME_BYTES:
        raise ChannelError(f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return framed(HEADER.pack(crc32(payload)) + payload)


def to_node(frame: bytes) -> ToNode:
    """A frame's content as a message to a node."""
    message: ToNode = _decoded(_to_node, frame)
    return message


def from_node(frame: bytes) -> FromNode:
    """A frame's content as a message from a node."""
    message: FromNode = _decoded(_from_node, frame)
    return message


def _decoded(decoder: "msgspec.msgpack.Decoder[_Kind]", frame: bytes) -> _Kind:
    payload = frame[HEADER.size :]
    if len(frame) < HEADER.size or HEADER.unpack_from(frame)[0] != crc32(payload):
        raise ChannelError(f"a frame of {len(frame)} bytes is damaged")
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ChannelError(f"a frame of {len(frame)} bytes is no message: {error}") from None


def encode_sampling(sampling: DraftSampling) -> Sampling:
    """Return the sampling parameters as a node gets them.

    Under *coupled* it draws with the request's own noise, so that ids are all that has to come back. The other rules
    would be biased by a node that knows their noise: it hears nothing of it and chooses the likeliest tokens.
    """
    record = sampling.record
    is_coupled = sampling.rule is Rule.COUPLED
    return Sampling(
        sampling.vocab_size,
        float(record["temperature"]) if is_coupled else 0.0,
        float(record["top_p"]),
        float(record["min_p"]),
        int(record["top_k"]),
        int(record["stem"]) if is_coupled else 0,
        sampling.bias_ids.tolist(),
        sampling.bias_values.tolist(),
        None if sampling.allowed_ids is None else sampling.allowed_ids.tolist(),
    )


def decode_sampling(sampling: Sampling, vocab_size: int) -> DraftSampling:
    """Return the parameters of a node's drafter; raises `ValueError` for invalid ones."""
    size = min(sampling.vocab_size, vocab_size)
    ids = (*sampling.bias_ids, *(sampling.allowed_ids or ()))
    if size < 1 or len(sampling.bias_ids) != len(sampling.bias_values) or max(ids, default=0) >= size:
        raise ValueError("sampling parameters outside the vocabulary")
    if not (
        sampling.stem < 1 << 64 and np.isfinite([sampling.temperature, sampling.top_p, sampling.min_p]).all()
    ):
        raise ValueError("sampling parameters that are no numbers")
    record = np.zeros((), RECORD)
    record["temperature"], record["top_p"], record["min_p"] = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
    )
    record["top_k"] = min(sampling.top_k or size, size)
    record["stem"], record["rule"], record["logprobs"] = sampling.stem, int(Rule.COUPLED), -1
    allowed = None if sampling.allowed_ids is None else np.array(sampling.allowed_ids, np.int64)
    return DraftSampling(
        size,
        record.tobytes(),
        np.array(sampling.bias_ids, np.int64),
        np.array(sampling.bias_values, np.float64),
        allowed,
        Rule.COUPLED,
    )
