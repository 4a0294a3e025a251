"""Messages between targets and draft nodes.

Frames contain a checksum and msgpack that decodes into the types below; an invalid frame ends the connection. Lost,
repeated or late messages are harmless: lengths are absolute, session numbers are never reused, and the target verifies
all drafts.
"""

from typing import Annotated, TypeVar
from zlib import crc32

import msgspec
import numpy as np

from foreword.acceptance.request import RECORD, DraftSampling
from foreword.acceptance.rules.rule import Rule
from foreword.cluster.framing import HEADER, ChannelError, framed

VERSION = 1  # protocol version; both sides must have the same
MAX_FRAME_BYTES = 16 * 1024 * 1024  # maximum frame size after the handshake: a prompt of millions of tokens
MAX_NODES = 128  # maximum draft tokens of a request, including those beyond the requested depth

Line = Annotated[str, msgspec.Meta(max_length=500)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Seconds = NonNegative


class NodeMessage(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of all messages. A message is an array that begins with its tag, by default the class name."""


class VocabularyDigest(msgspec.Struct, array_like=True, frozen=True):
    """Number of token ids, and SHA-256 of the tokens' bytes."""

    size: Count
    digest: Annotated[bytes, msgspec.Meta(max_length=32)]


class Challenge(NodeMessage, frozen=True):
    """From a node: the first message of a connection."""

    version: int
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]


class Hello(NodeMessage, frozen=True):
    """From a target: its identity and proof of the cluster token."""

    version: int
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
    proof: Annotated[bytes, msgspec.Meta(max_length=64)]
    incarnation: Count  # changes with every start
    vocabulary: VocabularyDigest


class Welcome(NodeMessage, frozen=True):
    """From a node: its identity, proof and properties."""

    proof: Annotated[bytes, msgspec.Meta(max_length=64)]
    incarnation: Count
    vocabulary: VocabularyDigest
    method: Line
    capacity: Count  # concurrent sessions
    labels: Annotated[dict[Line, Line], msgspec.Meta(max_length=16)] = {}  # host, rack, zone


class HandshakeRefusal(NodeMessage, frozen=True, tag="Refused"):
    """From either side, before it closes the connection: why it refuses the other."""

    reason: Line


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """Sampling parameters that a node's drafter needs. The seed is not sent; the prefix of the noise key suffices."""

    vocab_size: Count
    temperature: NonNegative = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: Count = 0  # 0: no limit
    stem: Annotated[int, msgspec.Meta(ge=0)] = 0  # prefix of the noise key
    bias_ids: list[Token] = []
    bias_values: list[float] = []
    allowed_ids: list[Token] | None = None


class Open(NodeMessage, frozen=True):
    """From a target: a new request. Repeating it has no effect."""

    session: Count  # unique within the connection
    tokens: list[Token]  # committed tokens
    prompt_len: Count
    sampling: Sampling
    tenant: Annotated[bytes, msgspec.Meta(max_length=32)] = b""  # a hash; tenants share nothing
    value: float = 0.0  # seconds in which this target generates one token; 0: unknown
    prediction: list[Token] = []  # answer that the client expects


class SessionCommit(msgspec.Struct, array_like=True, frozen=True):
    """A session's current text, and the requested draft size."""

    session: Count
    length: Count  # length of the whole text
    tokens: list[Token]  # newest tokens of the text
    nodes: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)]  # requested draft tokens; 0: none for now
    depth: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)]  # requested levels
    value: float = 0.0  # seconds in which this target generates one token; 0: unknown


class Commits(NodeMessage, frozen=True):
    """From a target, once per pass: the commits of all its sessions on this node."""

    commits: list[SessionCommit]


class SessionDraft(msgspec.Struct, array_like=True, frozen=True):
    """A session's whole draft, which replaces earlier drafts."""

    session: Count
    number: Count  # increases with every draft of the session
    length: Count  # length of the text that the draft follows
    is_all: bool  # whether the draft is complete, so that no more levels follow until the text grows
    tokens: Annotated[list[Token], msgspec.Meta(max_length=MAX_NODES)]
    parents: Annotated[list[int], msgspec.Meta(max_length=MAX_NODES)] = []  # empty: a chain


class SessionDrafts(NodeMessage, frozen=True, tag="Guesses"):
    """From a node, whenever it has drafted levels: the drafts of some sessions."""

    drafts: list[SessionDraft]


class Lagging(NodeMessage, frozen=True, tag="Behind"):
    """From a node: it lacks part of the session's text."""

    session: Count
    length: Count  # length of the text that the node has; 0: it lacks the whole session


class Close(NodeMessage, frozen=True):
    """From a target: the request has ended or moved to another node."""

    session: Count
    length: Count = 0  # length of the whole text, which some drafters index; 0: no new tokens
    tokens: list[Token] = []  # newest tokens of the text


class Busy(NodeMessage, frozen=True):
    """From a node: it drops the session in favour of more valuable ones."""

    session: Count
    retry_seconds: Seconds  # how long the target should open no session on the node


class NodeLoad(NodeMessage, frozen=True, tag="Load"):
    """From a node, periodically: its load."""

    sessions: Count  # sessions of all targets
    capacity: Count  # maximum number of sessions
    level_seconds: Seconds  # mean drafting time per level
    busy_share: float  # fraction of the time in which it drafts


class NodeDrain(NodeMessage, frozen=True, tag="Drain"):
    """From a node: it is leaving and takes no new sessions."""


class Ping(NodeMessage, frozen=True):
    """From a target: reply with `Pong` of the same number."""

    number: Count


class Pong(NodeMessage, frozen=True):
    """From a node: reply to `Ping`."""

    number: Count


ToNode = Hello | HandshakeRefusal | Open | Commits | Close | Ping
FromNode = (
    Challenge | Welcome | HandshakeRefusal | SessionDrafts | Lagging | Busy | NodeLoad | NodeDrain | Pong
)
_Kind = TypeVar("_Kind")

_encoder = msgspec.msgpack.Encoder()
_to_node: "msgspec.msgpack.Decoder[ToNode]" = msgspec.msgpack.Decoder(ToNode)
_from_node: "msgspec.msgpack.Decoder[FromNode]" = msgspec.msgpack.Decoder(FromNode)


def encode(message: ToNode | FromNode) -> bytes:
    """Return the frame of a message; raise `ChannelError` if it is too large."""
    payload = _encoder.encode(message)
    if len(payload) + HEADER.size > MAX_FRAME_BYTES:
        raise ChannelError(f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return framed(HEADER.pack(crc32(payload)) + payload)


def to_node(frame: bytes) -> ToNode:
    """Return the message in a frame that a node received; raise `ChannelError` for an invalid one."""
    return _decoded(_to_node, frame)


def from_node(frame: bytes) -> FromNode:
    """Return the message in a frame that a target received; raise `ChannelError` for an invalid one."""
    return _decoded(_from_node, frame)


def _decoded(decoder: "msgspec.msgpack.Decoder[_Kind]", frame: bytes) -> _Kind:
    payload = frame[HEADER.size :]
    if len(frame) < HEADER.size or HEADER.unpack_from(frame)[0] != crc32(payload):
        raise ChannelError(f"a frame of {len(frame)} bytes is damaged")
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ChannelError(f"a frame of {len(frame)} bytes is no message: {error}") from None


def encode_sampling(sampling: DraftSampling) -> Sampling:
    """Return the sampling parameters for a node.

    Under the rule *coupled*, a node samples with the request's noise. Under the other rules, drafts that depend on the
    noise would bias the text, so a node gets temperature 0 and chooses the likeliest tokens.
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
    """Return a node's parameters for its drafter, whose vocabulary has `vocab_size` tokens.

    Raise `ValueError` for invalid ones.
    """
    size = min(sampling.vocab_size, vocab_size)
    ids = (*sampling.bias_ids, *(sampling.allowed_ids or ()))
    if size < 1 or len(sampling.bias_ids) != len(sampling.bias_values) or max(ids, default=0) >= size:
        raise ValueError("sampling parameters outside the vocabulary")
    are_finite = np.isfinite([sampling.temperature, sampling.top_p, sampling.min_p]).all()
    if sampling.stem >= 1 << 64 or not are_finite:
        raise ValueError("sampling parameters that are no numbers")
    record = np.zeros((), RECORD)
    record["temperature"] = sampling.temperature
    record["top_p"] = sampling.top_p
    record["min_p"] = sampling.min_p
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
