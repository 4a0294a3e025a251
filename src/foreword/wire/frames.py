"""Messages between the API process and the engine process, in length-prefixed frames.

Frames contain msgpack that decodes into the types below, never pickled objects.
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
    """Base of all messages, tagged with their class name."""


class Start(_Message, frozen=True):
    """First message to the engine process: the model to load, as keywords of `Engine.load`."""

    model: str  # path, built-in name or hub id
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    speculation: dict[str, Any] | None = None  # default drafter
    config: dict[str, Any] = {}  # fields of EngineConfig that differ from the defaults
    adapters: dict[str, str] = {}  # LoRA adapters to load at the start: name -> folder
    tensor_parallel_size: int = 1
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    learning: dict[str, Any] = {}  # settings of a learner, for its engine factory; empty: none


class Submit(_Message, frozen=True):
    """To the engine process: answer this request."""

    request: NewRequest


class Abort(_Message, frozen=True):
    """To the engine process: abort the request with this id."""

    request_id: str


class Speculate(_Message, frozen=True):
    """To the engine process: switch speculation on or off for all requests."""

    on: bool


class MovePair(_Message, frozen=True):
    """To the engine process: change the roll-out stage of a drafter in a cohort."""

    drafter: str  # name
    cohort: str  # name
    state: str  # the new stage, or "next"


class LearnAction(_Message, frozen=True):
    """To the engine process: an action of the operator on the head that is trained while serving."""

    action: str  # "rollback" or "forget"
    tenant: str = ""  # whose texts to forget


class SetAdapter(_Message, frozen=True):
    """To the engine process: load or unload a LoRA adapter; answered by `AdapterSet` with the same number."""

    number: int
    name: str
    path: str | None = None  # None: unload it


class StatsWanted(_Message, frozen=True):
    """To the engine process: reply with `Stats` of the same number."""

    number: int


class Drain(_Message, frozen=True):
    """To the engine process: refuse new requests, finish the running ones, then exit."""

    deadline: float  # seconds that running requests have to finish


class Starting(_Message, frozen=True):
    """From the engine process before it is ready: the loading progress."""

    stage: str  # description of what is loaded
    done: int  # finished units, of `total`
    total: int


class Ready(_Message, frozen=True):
    """From the engine process: it accepts requests."""

    max_model_len: int  # maximum prompt and answer tokens


class Deltas(_Message, frozen=True):
    """From the engine process: new tokens of answers, one message per pass."""

    deltas: list[AnswerDelta]


class Refused(_Message, frozen=True):
    """From the engine process: a request was refused."""

    request_id: str
    error: str
    param: str | None = None  # the invalid field, if any


class Stats(_Message, frozen=True):
    """From the engine process: its statistics."""

    number: int  # of the `StatsWanted`
    engine: EngineStats


class AdapterSet(_Message, frozen=True):
    """From the engine process: result of `SetAdapter`."""

    number: int
    error: str | None = None  # None: success


class Fatal(_Message, frozen=True):
    """From the engine process: it cannot continue."""

    error: str


ToEngine = Start | Submit | Abort | Speculate | MovePair | LearnAction | SetAdapter | StatsWanted | Drain
FromEngine = Starting | Ready | Deltas | Refused | Stats | AdapterSet | Fatal
_Direction = TypeVar("_Direction")  # `ToEngine` or `FromEngine`


def _plain(value: Any) -> Any:  # noqa: ANN401 - msgspec's hook gets values of any unsupported type
    """Return a NumPy value as a Python value, which msgpack can encode."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} is not part of any message")


def _array(wanted: Any, value: Any) -> Any:  # noqa: ANN401 - msgspec's hook
    """Return a list as a NumPy array of the type `wanted`, such as `NDArray[np.float32]`."""
    if get_origin(wanted) is not np.ndarray or not isinstance(value, list):
        raise NotImplementedError(f"{wanted} is not part of any message")
    _, dtype = get_args(wanted)  # `NDArray[T]` is `ndarray[shape, dtype[T]]`
    (scalar,) = get_args(dtype)
    return np.array(value, dtype=scalar)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_engine: "msgspec.msgpack.Decoder[ToEngine]" = msgspec.msgpack.Decoder(ToEngine, dec_hook=_array)
_from_engine: "msgspec.msgpack.Decoder[FromEngine]" = msgspec.msgpack.Decoder(FromEngine, dec_hook=_array)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Return the frame of a message; raise `ChannelError` if it is too large."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ChannelError(f"a message of {len(payload)} bytes is over the channel's limit")
    return framed(payload)


def decode_to_engine(payload: bytes) -> ToEngine:
    """Return the message in a frame to the engine process; raise `ChannelError` for an invalid one."""
    return _decoded(_to_engine, payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    """Return the message in a frame from the engine process; raise `ChannelError` for an invalid one."""
    return _decoded(_from_engine, payload)


def _decoded(decoder: "msgspec.msgpack.Decoder[_Direction]", payload: bytes) -> _Direction:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ForewordError, ValueError, RecursionError) as error:
        raise ChannelError(f"a frame of {len(payload)} bytes is no message: {error}") from None


class Channel:
    """Sends messages and receives frames over a stream socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: ToEngine | FromEngine) -> None:
        self._writer.write(encode(message))

    async def flush(self) -> None:
        """Wait while the send buffer is full."""
        await self._writer.drain()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield frames until the other side closes; raise `ChannelError` for damaged ones."""
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
