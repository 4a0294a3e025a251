"""Three targets, three draft nodes, and everything that can happen between them."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from foreword import LLM
from foreword.cluster.address import NodeAddress
from foreword.cluster.node_server import DraftNode
from foreword.drafters.config import SpeculationConfig
from foreword.engine.loader import LoadedModel
from foreword.speculation.drafting import NodeReport
from foreword.wire.draft_node import NodeSettings, make_node
from helpers.chaos_proxy import ChaosProxy
from helpers.draft_nodes import remote_of, until
from helpers.drafted_answers import PROMPTS, answers, mixed_params
from helpers.hostile_node import Turncoat
from helpers.warm_process import Forked, warm

FORM = {"method": "draft_model", "model": "the one that is loaded"}


@dataclass
class NodeHere:
    """A node in this process; each start is another incarnation."""

    loaded: LoadedModel
    address: NodeAddress
    _node: DraftNode | None = None

    def start(self) -> None:
        self._node = make_node(self.loaded, SpeculationConfig.parse(FORM), NodeSettings(self.address))
        self._node.start()

    def kill(self) -> None:
        if self._node is not None:
            self._node.close()
        self._node = None

    @property
    def sessions(self) -> int:
        return 0 if self._node is None else self._node.sessions


@dataclass
class NodeProcess:
    """A node in a process of its own, which can really be killed."""

    model: Path
    address: NodeAddress
    _process: Forked | None = None
    _output: IO[str] = field(init=False)

    def start(self) -> None:
        command = ["draft-node", "--model", str(self.model), "--listen", str(self.address)]
        reading, writing = os.pipe()
        with Path(os.devnull).open("r+") as nothing, os.fdopen(writing, "w"):
            streams = [nothing.fileno(), writing, nothing.fileno()]
            self._process = warm.start([*command, "--dtype", "float32", "--device", "cpu"], streams)
        self._output = os.fdopen(reading)
        assert "drafts on" in self._output.readline()

    def hang(self) -> None:
        """Stop it where it is; the kernel keeps its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._output.close()
        self._process = None

    sessions = 0  # nobody here can look into it


@dataclass
class Target:
    """An engine that answers the same prompts over and over, and what plain decoding gives for them."""

    llm: LLM
    plain: list[list[int]]
    rounds: int = 0
    accepted: int = 0
    error: BaseException | None = None
    _thread: threading.Thread | None = field(default=None, repr=False)

    def run(self, is_over: threading.Event) -> None:
        def work() -> None:
            try:
                while not is_over.is_set():
                    self.answer()
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def answer(self) -> None:
        outputs = self.llm.generate(PROMPTS, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == self.plain
        self.accepted += sum(output.timings.draft_n_accepted for output in outputs)
        self.llm.engine.check_integrity()
        self.rounds += 1

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(120)
        assert not self._thread.is_alive(), "a target hangs"
        if self.error is not None:
            raise self.error


PARAMS = mixed_params(len(PROMPTS), max_tokens=12)


class Drill:
    """Traffic, faults, and the count afterwards."""

    def __init__(self, model: Path, nodes: Sequence[Any], seed: int = 0) -> None:
        self._nodes = nodes
        self._rng = random.Random(seed)
        for node in nodes:
            node.start()
        self._proxies = [ChaosProxy(node.address, {"delay": 0.02, "double": 0.02}, seed) for node in nodes]
        drafters = ",".join(str(proxy.address) for proxy in self._proxies)
        self.targets = [self._target(model, drafters) for _ in range(3)]
        self.faults = dict.fromkeys(("kill", "partition", "cut", "hang", "turn"), 0)
        self._turncoat = Turncoat(self.targets[0].llm.loaded.vocab_size, seed)

    def _target(self, model: Path, drafters: str) -> Target:
        llm = LLM(str(model), dtype="float32", device="cpu", backend="cpu", speculation="off")
        plain = answers(llm, PROMPTS, PARAMS)
        speculation = {"method": "remote", "drafters": drafters, "num_speculative_tokens": 4}
        llm.speculate({**speculation, "fixed": True, "shadow": 2})
        return Target(llm, plain)

    def run(self, pause: float, faults: int = 1 << 30, seconds: float = float("inf")) -> None:
        """Inject so many faults, or for so long, one after the other, while all targets answer."""
        is_over, until_when = threading.Event(), time.monotonic() + seconds
        for target in self.targets:
            target.run(is_over)
        try:
            for number in range(faults):
                if time.monotonic() > until_when:
                    break
                time.sleep(pause * self._rng.random())
                if number % len(self.faults) == 0:  # each kind once, in another order every time
                    order = self._rng.sample(list(self.faults), len(self.faults))
                fault, place = order[number % len(order)], self._rng.randrange(len(self._nodes))
                self.faults[fault] += 1
                getattr(self, f"_{fault}")(place, pause * self._rng.random())
        finally:
            is_over.set()
            for target in self.targets:
                target.join()

    def _kill(self, place: int, pause: float) -> None:
        self._nodes[place].kill()
        time.sleep(pause)
        self._nodes[place].start()

    def _partition(self, place: int, pause: float) -> None:
        self._proxies[place].is_partitioned = True
        time.sleep(pause)
        self._proxies[place].is_partitioned = False
        self._proxies[place].cut()  # bytes that were lost do not come back: such connections end

    def _cut(self, place: int, _pause: float) -> None:
        self._proxies[place].cut()

    def _hang(self, place: int, _pause: float) -> None:
        """A node in use stops answering, with its connections open: targets go on."""
        node, proxy = self._nodes[place], self._proxies[place]
        self._until_used(place)
        hang, wake = (node.hang, node.wake) if isinstance(node, NodeProcess) else (proxy.hold, proxy.release)
        hang()
        try:
            self._until_answered()
        finally:
            wake()

    def _turn(self, place: int, _pause: float) -> None:
        """A node that was honest throughout its shadow phase becomes hostile."""
        self._until_used(place)
        spoiled = self._turncoat.spoiled
        self._proxies[place].spoil = self._turncoat
        try:
            self._until(lambda: self._turncoat.spoiled > spoiled)
            self._until_answered()
        finally:
            self._proxies[place].spoil = None
        self._proxies[place].cut()  # what sessions have heard stays with their connection

    def _until_used(self, place: int) -> None:
        """Wait until a target verifies what the node drafts."""
        self._until(lambda: any(node.state == "up" and node.homes for node in self._reports(place)))

    def _until_answered(self) -> None:
        """Wait until every target has answered everything once more, from its beginning."""
        rounds = [target.rounds for target in self.targets]
        self._until(
            lambda: all(now.rounds > before + 1 for now, before in zip(self.targets, rounds, strict=True))
        )

    def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that the targets do, or fail as they do."""
        until(lambda: any(target.error for target in self.targets) or is_so(), 120)

    def _reports(self, place: int) -> list[NodeReport]:
        name = str(self._proxies[place].address)
        nodes = (node for target in self.targets for node in remote_of(target.llm).nodes())
        return [node for node in nodes if node.address == name]

    def recover(self) -> None:
        """Everything is well again: all nodes are used by all targets, without anybody's doing."""
        for target in self.targets:
            before = target.accepted
            states = remote_of(target.llm).nodes

            def is_well(target: Target = target, states: Any = states, before: int = before) -> bool:
                target.answer()
                used = all(node.state in ("up", "shadow", "late") for node in states())
                return used and target.accepted > before

            until(is_well, 120)

    def check_nothing_is_left(self) -> None:
        """No page, no home and no session outlives its request."""
        for target in self.targets:
            engine = target.llm.engine
            assert engine.cache.available_pages == engine.cache.pool.num_pages
            assert all(node.homes == 0 for node in remote_of(target.llm).nodes())
            assert not engine.faults
        until(lambda: all(node.sessions == 0 for node in self._nodes))

    def close(self) -> None:
        for target in self.targets:
            target.llm.speculate(None)
        for proxy in self._proxies:
            proxy.close()
        for node in self._nodes:
            node.kill()
