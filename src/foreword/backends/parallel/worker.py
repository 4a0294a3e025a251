"""Worker process of one rank: loads its share of a model and executes the driver's orders.

The driver runs it as `python -m foreword.backends.parallel.worker FD`, with a connected socket as FD and a pipe as
standard input. The process ends when the pipe closes.
"""

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from foreword.backends.batch import BatchSizes
from foreword.backends.parallel.exchange import RankExchange, join_group
from foreword.backends.parallel.messages import (
    Forward,
    JoinRanks,
    LoadShard,
    MakeStore,
    MoveRows,
    RankReply,
    SentOrder,
    SetRankAdapter,
    TakeLayers,
    parsed_adapter,
    parsed_batch,
    parsed_moves,
)
from foreword.backends.parallel.rank import RankDecoder, load_rank
from foreword.backends.torch.decoder import silence_bfloat16_warning
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.errors import EngineStopped, ForewordError
from foreword.kv.chunks import StateSizes
from foreword.models.formats.checkpoint import open_checkpoint

_POLL_SECONDS = 5.0
"""Seconds between checks whether the driver still runs."""


class Worker:
    """State of one rank: decoders and KV stores by number."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._exchange: RankExchange | None = None
        self._decoders: dict[int, RankDecoder] = {}
        self._stores: dict[int, TorchKvStore] = {}

    def execute(self, sent: SentOrder) -> None:
        """Release what the driver no longer needs, then execute the order."""
        for number in sent.released:
            self._decoders.pop(number, None)
            self._stores.pop(number, None)
        match sent.order:
            case JoinRanks(rank, size, device, threads, rendezvous):
                self._device = torch.device(device)
                torch.set_num_threads(threads)
                self._exchange = join_group(self._device, rank, size, rendezvous)
            case LoadShard(made, path, dtype):
                self._decoders[made] = self._load(Path(path), getattr(torch, dtype))
            case TakeLayers(made, decoder, layers):
                self._decoders[made] = self._decoders[decoder].with_layers(layers)
            case MakeStore(made, decoder, num_pages, page_size, states):
                self._stores[made] = self._decoders[decoder].new_kv_store(
                    num_pages, page_size, states=StateSizes(*states)
                )
            case MoveRows(store):
                self._stores[store].move(parsed_moves(sent.payload).to(self._device))
            case SetRankAdapter(decoder, slot):
                self._decoders[decoder].set_adapter(slot, parsed_adapter(sent.payload))
            case Forward() as order:
                self._forward(order, sent.payload)

    def _load(self, path: Path, dtype: torch.dtype) -> RankDecoder:
        assert self._exchange is not None
        checkpoint = open_checkpoint(path)
        decoder = load_rank(checkpoint, self._exchange, dtype, self._device)
        checkpoint.release()
        return decoder

    def _forward(self, order: Forward, payload: bytes) -> None:
        drawn = None
        if order.drawn:
            assert self._exchange is not None
            drawn = torch.empty(order.drawn, dtype=torch.int64, device=self._device)
            self._exchange.broadcast(drawn)
        decoder = self._decoders[order.decoder]
        try:
            batch = replace(parsed_batch(order, payload), drawn_before=drawn)
            store = self._stores[order.store]
        except BaseException:
            decoder.skip_pass(BatchSizes(*order.sizes))
            raise
        decoder.forward(batch, store)


def serve(connection: Connection) -> None:
    """Execute orders until the driver is gone. Report failures; return if another rank is gone."""
    worker = Worker()
    RankReply(0).send(connection)  # reply to order 0, which is never sent: imports are complete
    while True:
        sent = SentOrder.receive(connection)
        try:
            worker.execute(sent)
        except EngineStopped:
            return
        except Exception as error:
            message = str(error) if isinstance(error, ForewordError) else f"{type(error).__name__}: {error}"
            RankReply(sent.number, " ".join(message.split())).send(connection)
        else:
            RankReply(sent.number).send(connection)


def _end_with_the_driver() -> None:
    """Wait until the driver is gone, then end this process, also during a pass."""
    driver = os.getppid()
    while os.getppid() == driver:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_SECONDS)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    os._exit(0)


def main() -> None:
    """Run the worker. It ignores signals to the process group, which the driver handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_driver, daemon=True).start()
    silence_bfloat16_warning()
    connection: Connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, OSError):  # the driver is gone
        serve(connection)
    os._exit(0)  # not `return`: a waiting collective would keep the process alive


if __name__ == "__main__":
    main()
