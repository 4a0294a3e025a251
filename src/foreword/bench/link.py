"""Measures the connection to a draft node: round trip, time per draft level, and host time per target pass."""

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep, thread_time
from typing import Annotated

import numpy as np

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.bench.skeleton import InTable
from foreword.cluster.address import NodeAddress
from foreword.cluster.framing import FrameSplitter
from foreword.cluster.handshake import HANDSHAKE_SECONDS, PeerIdentity, greet_node
from foreword.cluster.messages import MAX_FRAME_BYTES, Ping, Pong, encode, from_node
from foreword.cluster.pools.scaling import gained_tokens
from foreword.cluster.remote_drafter import RemoteDrafter
from foreword.cluster.settings import RemoteConfig
from foreword.errors import RequestError
from foreword.speculation.drafting import DraftRequest, DraftTask, Text

PINGS = 200
PROMPT = 64  # tokens of a synthetic prompt
WORDS = 23  # number of distinct tokens in the prompts


@dataclass(frozen=True)
class PassCost:
    """Times of simulated target passes at one batch size."""

    batch: Annotated[int, InTable("batch")]
    passes: int
    engine_ms: Annotated[float, InTable("engine ms/pass", ".3f")]  # median host time per pass, without waits
    waited_ms: Annotated[float, InTable("waited ms/pass", ".3f")]  # mean wait per pass
    levels: Annotated[float, InTable("levels arrived", ".3f")]  # mean number of levels at the start of a pass
    # From sending a text to the arrival of its first level; None: no level arrived.
    first_ms: Annotated[float | None, InTable("first level ms", ".3f")]
    level_ms: Annotated[float | None, InTable("next level ms", ".3f")]  # between the arrivals of two levels


@dataclass(frozen=True)
class LinkReport:
    """Measurements of one node."""

    node: str  # address
    round_trip_ms: float  # median ping
    round_trip_p99_ms: float
    costs: tuple[PassCost, ...]

    def break_even_ms(self, acceptance: float, levels: int, pass_ms: float) -> float | None:
        """Return the round trip in ms above which waiting for a draft of so many levels costs more than it gains.

        A draft saves one plain pass per gained token and costs the drafting time of its levels, here at the smallest
        batch. None: no level arrived in time, so the drafting time is unknown.
        """
        cost = min(self.costs, key=lambda cost: cost.batch)
        if not cost.levels:
            return None
        return gained_tokens(acceptance, levels) * pass_ms - levels * (cost.level_ms or 0.0)


def measure_link(
    address: NodeAddress,
    identity: PeerIdentity,
    config: RemoteConfig,
    batches: Sequence[int],
    passes: int,
    pass_seconds: float,
) -> LinkReport:
    """Measure pings, then `passes` simulated passes of `pass_seconds` at every batch size."""
    times = sorted(_pings(address, identity))
    drafter = RemoteDrafter(config, identity).start()
    try:
        _wait_for(drafter)
        costs = tuple(_cost(drafter, identity, batch, passes, pass_seconds) for batch in batches)
    finally:
        drafter.close()
    return LinkReport(str(address), median(times) * 1e3, times[int(0.99 * (len(times) - 1))] * 1e3, costs)


def _pings(address: NodeAddress, identity: PeerIdentity) -> list[float]:
    tls = identity.security.tls
    connected = address.connect(HANDSHAKE_SECONDS)
    try:
        if tls is not None:
            connected = tls.context(is_node=False).wrap_socket(connected)
        greet_node(connected, identity)
        splitter = FrameSplitter(MAX_FRAME_BYTES)
        return [_ping(connected, splitter, number) for number in range(PINGS)]
    finally:
        connected.close()


def _ping(connected: socket.socket, splitter: FrameSplitter, number: int) -> float:
    began = perf_counter()
    connected.sendall(encode(Ping(number)))
    while True:  # the node also sends load reports
        for frame in splitter.feed(connected.recv(1 << 16)):
            if from_node(frame) == Pong(number):
                return perf_counter() - began


def _wait_for(drafter: RemoteDrafter) -> None:
    """Wait until the drafter's node is connected; raise `RequestError` after `HANDSHAKE_SECONDS`."""
    deadline = perf_counter() + HANDSHAKE_SECONDS
    while all(node.state == "down" for node in drafter.nodes()):
        if perf_counter() > deadline:
            raise RequestError(f"no draft node to measure: {drafter.nodes()[0].reason}")
        sleep(0.01)


_MATRIX = np.ones((192, 192), np.float32)


def _compute(seconds: float) -> None:
    """Keep a core busy, and evict the engine's data from the caches, as a real pass does."""
    deadline = perf_counter() + seconds
    while perf_counter() < deadline:
        _MATRIX @ _MATRIX


def _token(position: int, request: int, vocab_size: int) -> int:
    """Return the token at a position of a request's synthetic text, which repeats itself, so that lookups can draft."""
    return (7 * position * position + position // 5 + 13 * request) % min(WORDS, vocab_size)


def _cost(
    drafter: RemoteDrafter, identity: PeerIdentity, batch: int, passes: int, pass_seconds: float
) -> PassCost:
    """Measure simulated passes over `batch` requests, each of which accepts two draft tokens per pass."""
    size = identity.vocabulary.size
    texts = [[_token(position, index, size) for position in range(PROMPT)] for index in range(batch)]
    limits, params = TokenLimits(size), SamplingParams(temperature=0)
    samplers = [RequestSampler(params, limits, text, seed=0) for text in texts]
    request_ids = [secrets.randbits(62) for _ in texts]

    def request(index: int) -> DraftRequest:
        return DraftRequest(request_ids[index], Text(texts[index]), samplers[index].drafting(), PROMPT)

    host_seconds: list[float] = []
    waited, levels = 0.0, 0
    for _ in range(passes):
        tasks = [DraftTask(request(index), max_nodes=5, max_depth=5) for index in range(batch)]
        waited_before, began = drafter.nodes()[0].wait_seconds, thread_time()
        drafts = drafter.propose(tasks)
        host_seconds.append(thread_time() - began)
        waited += drafter.nodes()[0].wait_seconds - waited_before
        levels += sum(draft.depth for draft in drafts)
        _compute(pass_seconds)
        for index, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            text.extend(draft.tokens[:2])  # two accepted draft tokens, then the target's token
            text.append(_token(len(text), index, size))
    node = drafter.nodes()[0]
    for index in range(batch):
        drafter.forget(request(index))
    host_ms, waited_ms = median(host_seconds) * 1e3, waited / passes * 1e3
    return PassCost(batch, passes, host_ms, waited_ms, levels / passes / batch, node.first_ms, node.level_ms)
