"""Models whose passes take a time that is told, on a device that is not this machine's: they sleep."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from foreword.cluster.address import NodeAddress
from foreword.drafters.config import SpeculationConfig
from foreword.engine.loader import load_model
from foreword.wire.draft_node import NodeSettings, make_node
from helpers.draft_nodes import ANY_PORT

TARGET_PACE = (0.100, 0.0015)
NODE_PACE = (0.004, 0.0003)
"""Seconds of a pass over no rows, and of every row."""


def pace(decoder: Any, first: float, per_row: float) -> None:
    """Its passes take as long as that from now on; what they compute is within it."""
    forward: Callable[..., Any] = decoder.forward

    def paced(batch: Any, store: Any) -> Any:
        until = time.perf_counter() + first + per_row * len(batch.token_ids)
        output = forward(batch, store)
        time.sleep(max(until - time.perf_counter(), 0.0))
        return output

    decoder.forward = paced


def _serve(model: str, runs_ahead: bool, told: Connection) -> None:
    loaded = load_model(model, dtype="float32", device="cpu", backend="cpu")
    pace(loaded.decoder, *NODE_PACE)
    form = SpeculationConfig.parse({"method": "draft_model", "model": model})
    node = make_node(loaded, form, NodeSettings(ANY_PORT, runs_ahead=runs_ahead))
    node.start()
    told.send(str(node.address))
    told.recv()  # until nobody needs it
    node.close()


@contextmanager
def paced_node(model: Path, runs_ahead: bool = True) -> Iterator[NodeAddress]:
    """A draft node in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(str(model), runs_ahead, there))
    process.start()
    try:
        assert here.poll(60), "the node did not start"
        yield NodeAddress.parse(here.recv())
    finally:
        here.send(None)
        process.join(10)
