"""Messages between the driver (the first rank) and worker processes: orders and replies.

An order is JSON followed by bytes for arrays; a reply is JSON with its order's number. Messages contain no code and
need no optional dependencies. The driver numbers decoders and KV stores; `made` is the number of a new one.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as written_tensors

from foreword.backends.batch import BATCH_ARRAYS, BatchArrays, BatchSizes, ForwardBatch, RequestChunks
from foreword.kv.chunks import Chunk
from foreword.models.adapters import Factors, Lora


@dataclass(frozen=True)
class JoinRanks:
    """Join the process group."""

    rank: int
    size: int  # number of ranks
    device: str
    threads: int  # of torch, for this rank
    rendezvous: str  # path of a file


@dataclass(frozen=True)
class LoadShard:
    """Load the rank's share of a model as decoder `made`."""

    made: int
    path: str
    dtype: str  # name of a torch dtype


@dataclass(frozen=True)
class TakeLayers:
    """Create decoder `made` from some layers of another."""

    made: int
    decoder: int
    layers: list[int]


@dataclass(frozen=True)
class MakeStore:
    """Allocate KV store `made` for a decoder's rows."""

    made: int
    decoder: int
    num_pages: int
    page_size: int
    states: list[int]  # `StateSizes`


@dataclass(frozen=True)
class MoveRows:
    """Copy KV rows; the payload has the pairs (from, to)."""

    store: int


@dataclass(frozen=True)
class SetRankAdapter:
    """Set a slot's adapter to the factors in the payload; an empty payload removes the adapter."""

    decoder: int
    slot: int


@dataclass(frozen=True)
class Forward:
    """Run a pass over the payload's batch."""

    decoder: int
    store: int
    sizes: list[int]  # `BatchSizes`
    adapters: list[int]  # `ForwardBatch.adapters`
    drawn: int  # number of tokens drawn by the previous pass, which the driver broadcasts next; 0: none
    chunks: list[list[Any]]  # `ForwardBatch.chunks`, as nested lists
    ring_copies: list[list[int]]  # `ForwardBatch.ring_copies`


Order = JoinRanks | LoadShard | TakeLayers | MakeStore | MoveRows | SetRankAdapter | Forward

_ORDERS: dict[str, type[Order]] = {
    kind.__name__: kind
    for kind in (JoinRanks, LoadShard, TakeLayers, MakeStore, MoveRows, SetRankAdapter, Forward)
}


@dataclass(frozen=True)
class SentOrder:
    """An order with its number and payload."""

    number: int
    order: Order
    released: list[int] = field(default_factory=list)  # decoders and stores to release
    payload: bytes = b""

    def send(self, connection: Connection) -> None:
        head = {
            "number": self.number,
            "kind": type(self.order).__name__,
            "released": self.released,
            "fields": asdict(self.order),
        }
        connection.send_bytes(json.dumps(head).encode())
        connection.send_bytes(self.payload)

    @staticmethod
    def receive(connection: Connection) -> "SentOrder":
        head = json.loads(connection.recv_bytes())
        order = _ORDERS[head["kind"]](**head["fields"])
        return SentOrder(head["number"], order, head["released"], connection.recv_bytes())


@dataclass(frozen=True)
class RankReply:
    """Result of an order."""

    number: int  # of the order
    error: str = ""  # empty: the order was executed

    def send(self, connection: Connection) -> None:
        connection.send_bytes(json.dumps(asdict(self)).encode())

    @staticmethod
    def receive(connection: Connection) -> "RankReply":
        return RankReply(**json.loads(connection.recv_bytes()))


def packed_batch(batch: ForwardBatch) -> bytes:
    """Return all arrays of a batch on the CPU, concatenated."""
    arrays = batch.arrays
    return b"".join(np.ascontiguousarray(getattr(arrays, spec.name)).tobytes() for spec in BATCH_ARRAYS)


def parsed_batch(order: Forward, payload: bytes) -> ForwardBatch:
    batch = ForwardBatch.of(BatchArrays.views_of(_ints(payload), BatchSizes(*order.sizes)))
    chunks = tuple(
        RequestChunks(begin, run, Chunk(*read), tuple(Chunk(*chunk) for chunk in entered))
        for begin, run, read, entered in order.chunks
    )
    copies = tuple((source, target) for source, target in order.ring_copies)
    return replace(batch, adapters=tuple(order.adapters), chunks=chunks, ring_copies=copies)


def packed_moves(copies: torch.Tensor) -> bytes:
    return copies.to("cpu", torch.int32).contiguous().numpy().tobytes()


def parsed_moves(payload: bytes) -> torch.Tensor:
    return torch.from_numpy(_ints(payload).reshape(-1, 2))


def packed_adapter(adapter: Lora | None) -> bytes:
    if adapter is None:
        return b""
    tensors = {}
    for (layer, module), factors in adapter.factors.items():
        tensors[f"{layer} {module} down"] = factors.down
        tensors[f"{layer} {module} up"] = factors.up
    return written_tensors(tensors)


def parsed_adapter(payload: bytes) -> Lora | None:
    if not payload:
        return None
    tensors = parse_tensors(payload)
    modules = [name.split()[:2] for name in tensors if name.endswith(" up")]
    return Lora(
        {
            (int(layer), module): Factors(tensors[f"{layer} {module} down"], tensors[f"{layer} {module} up"])
            for layer, module in modules
        }
    )


def _ints(payload: bytes) -> NDArray[np.int32]:
    # A copy, because torch warns about arrays that cannot be written.
    return np.frombuffer(bytearray(payload), dtype=np.int32)
