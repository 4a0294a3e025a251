"""Measures the link to a draft node: round trip, time of a level, and host time of the target per pass."""

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep, thread_time

import numpy as np

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
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
PROMPT = 64  # length of synthetic prompts
WORDS = 23  # number of distinct tokens in them


@dataclass(frozen=True)
class PassCost:
    """Costs at one batch size."""

    batch: int
    passes: int
    engine_ms: float  # median host time per pass, without waits
    waited_ms: float  # mean wait per pass
    levels: float  # mean number of draft levels available at the start of a pass
    first_ms: float | None  # time from sending a text to its first level
    level_ms: float | None  # time between levels


@dataclass(frozen=True)
class LinkReport:
    """Measurements of one node."""

    node: str
    round_trip_ms: float  # median ping
    round_trip_p99_ms: float
    costs: tuple[PassCost, ...]

    def break_even_ms(self, acceptance: float, levels: int, pass_ms: float) -> float | None:
        """Return the round trip in ms above which waiting for drafts costs more than it gains, at the smallest batch.

        A draft saves one plain pass per gained token and costs the drafting time of its levels. None: no level arrived
        in time, so the drafting time is unknown.
        """
        cost = min(self.costs, key=lambda one: one.batch)
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
    """Measure pings, then simulated passes of every batch size."""
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
    while True:  # skip load reports
        for frame in splitter.feed(connected.recv(1 << 16)):
            if from_node(frame) == Pong(number):
                return perf_counter() - began


def _wait_for(drafter: RemoteDrafter) -> None:
    until = perf_counter() + HANDSHAKE_SECONDS
    while all(node.state == "down" for node in drafter.nodes()):
        if perf_counter() > until:
            raise RequestError(f"no draft node to measure: {drafter.nodes()[0].reason}")
        sleep(0.01)


_MATRIX = np.ones((192, 192), np.float32)


def _compute(seconds: float) -> None:
    """Keep a core busy for this time. As after a real pass, the caches do not hold the engine's data afterwards."""
    until = perf_counter() + seconds
    while perf_counter() < until:
        _MATRIX @ _MATRIX


def _token(place: int, number: int, size: int) -> int:
    """Return a token of a repetitive synthetic text, which lookups can draft."""
    return (7 * place * place + place // 5 + 13 * number) % min(WORDS, size)


def _cost(
    drafter: RemoteDrafter, identity: PeerIdentity, batch: int, passes: int, pass_seconds: float
) -> PassCost:
    size = identity.vocabulary.size
    texts = [[_token(place, number, size) for place in range(PROMPT)] for number in range(batch)]
    limits, params = TokenLimits(size), SamplingParams(temperature=0)
    samplers = [RequestSampler(params, limits, text, seed=0) for text in texts]
    numbers = [secrets.randbits(62) for _ in texts]

    def request(place: int) -> DraftRequest:
        return DraftRequest(numbers[place], Text(texts[place]), samplers[place].drafting(), PROMPT)

    spent: list[float] = []
    waited, levels = 0.0, 0
    for _ in range(passes):
        tasks = [DraftTask(request(place), 5, 5) for place in range(batch)]
        before, began = drafter.nodes()[0].wait_seconds, thread_time()
        drafts = drafter.propose(tasks)
        spent.append(thread_time() - began)
        waited += drafter.nodes()[0].wait_seconds - before
        levels += sum(draft.depth for draft in drafts)
        _compute(pass_seconds)
        for number, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            text.extend(draft.tokens[:2])  # two accepted draft tokens, then another token
            text.append(_token(len(text), number, size))
    node = drafter.nodes()[0]
    for place in range(batch):
        drafter.forget(request(place))
    host_ms, waited_ms = median(spent) * 1e3, waited / passes * 1e3
    return PassCost(batch, passes, host_ms, waited_ms, levels / passes / batch, node.first_ms, node.level_ms)
