"""What the API process and the engine process say to each other: typed messages in length-prefixed frames.

Nothing on the wire is code: frames hold msgpack that decodes into the types below or not at all.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from foreword.cluster.framing import MAX_FRAME_BYTES, ChannelError, FrameSplitter, framed
from foreword.engine.messages import AnswerDelta, EngineStats, NewRequest
from foreword.errors import ForewordError

_READ_BYTES = 1 << 18


class _Message(msgspec.Struct, tag=True, frozen=True):
    """Base of all messages: on the wire they carry their class's name."""


class Start(_Message, frozen=True):
    """To the engine process, first of all: what to load. Keywords of `Engine.load`."""

    model: str  # path, built-in name or hub id
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    speculation: dict[str, Any] | None = None  # the drafter, unless a request names another
    config: dict[str, Any] = {}  # fields of EngineConfig that differ from the defaults
    adapters: dict[str, str] = {}  # LoRA adapters to begin with: name -> folder
    tensor_parallel_size: int = 1
    quantization: str = "auto"


class Submit(_Message, frozen=True):
    """To the engine process: answer this."""

    request: NewRequest


class Abort(_Message, frozen=True):
    """To the engine process: end this answer; its reader has left."""

    request_id: str


class Speculate(_Message, frozen=True):
    """To the engine process: switch speculation on or off for all requests."""

    on: bool


class MovePair(_Message, frozen=True):
    """To the engine process: the operator moves a drafter of the policy file in a cohort."""

    drafter: str
    cohort: str
    state: str


class SetAdapter(_Message, frozen=True):
    """To the engine process: load a LoRA adapter, or unload it; answered with `AdapterSet` of the same number."""

    number: int
    name: str
    path: str | None = None  # None: unload it


class StatsWanted(_Message, frozen=True):
    """To the engine process: answer with `Stats` of the same number."""

    number: int


class Drain(_Message, frozen=True):
    """To the engine process: take nothing new, end within this many seconds, then exit."""

    deadline: float


class Starting(_Message, frozen=True):
    """From the engine process, before it is ready: what it does, and how far it is."""

    stage: str
    done: int
    total: int


class Ready(_Message, frozen=True):
    """From the engine process: requests can come."""

    max_model_len: int  # most tokens of prompt and answer together


class Deltas(_Message, frozen=True):
    """From the engine process: answers have grown; what one pass gave all of them comes together."""

    deltas: list[AnswerDelta]


class Refused(_Message, frozen=True):
    """From the engine process: the request cannot be answered as it is."""

    request_id: str
    error: str
    param: str | None = None  # the field that is wrong, where one is


class Stats(_Message, frozen=True):
    """From the engine process: how it is doing."""

    number: int
    engine: EngineStats


class AdapterSet(_Message, frozen=True):
    """From the engine process: it was done, or why not."""

    number: int
    error: str | None = None


class Fatal(_Message, frozen=True):
    """From the engine process: it cannot go on, and why."""

    error: str


ToEngine = Start | Submit | Abort | Speculate | MovePair | SetAdapter | StatsWanted | Drain
FromEngine = Starting | Ready | Deltas | Refused | Stats | AdapterSet | Fatal
_Kind = TypeVar("_Kind")


def _plain(value: Any) -> Any:  # noqa: ANN401 - msgspec's hook takes whatever it does not know
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} is not part of any message")


def _array(wanted: Any, value: Any) -> Any:  # noqa: ANN401 - msgspec's hook
    if get_origin(wanted) is not np.ndarray or not isinstance(value, list):
        raise NotImplementedError(f"{wanted} is not part of any message")
    (scalar,) = get_args(get_args(wanted)[1])
    return np.array(value, dtype=scalar)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_engine = msgspec.msgpack.Decoder(ToEngine, dec_hook=_array)
_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_array)


def encode(message: ToEngine | FromEngine) -> bytes:
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ChannelError(f"a message of {len(payload)} bytes is over the channel's limit")
    return framed(payload)


def decode_to_engine(payload: bytes) -> ToEngine:
    """A frame's content as a message to the engine process."""
    message: ToEngine = _decoded(_to_engine, payload)
    return message


def decode_from_engine(payload: bytes) -> FromEngine:
    """A frame's content as a message from the engine process."""
    message: FromEngine = _decoded(_from_engine, payload)
    return message


def _decoded(decoder: "msgspec.msgpack.Decoder[_Kind]", payload: bytes) -> _Kind:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ForewordError, ValueError, RecursionError) as error:
        raise ChannelError(f"a frame of {len(payload)} bytes is no message: {error}") from None


class Channel:
    """Sends whole frames and receives them, over a stream socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: ToEngine | FromEngine) -> None:
        """Hand a message over; it is written as soon as the other side reads."""
        self._writer.write(encode(message))

    async def flush(self) -> None:
        """Wait while more is buffered than is good."""
        await self._writer.drain()

    async def frames(self) -> AsyncIterator[bytes]:
        """Contents of frames until the other side closes; damage raises `ChannelError`."""
        splitter = FrameSplitter()
        while True:
            try:
                data = await self._reader.read(_READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                break
            for frame in splitter.feed(data):
                yield frame
        if splitter.inside_frame:
            raise ChannelError("the channel ended in the middle of a frame")

    def close(self) -> None:
        self._writer.close()
