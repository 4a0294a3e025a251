"""A learner with a scripted clock, whose trainings and roll-outs the test plays."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from foreword.control.policy_file.document import OTHER, PolicyFile, Stage
from foreword.control.policy_file.parsing import read_policy
from foreword.control.rollout.pair import PairRollout
from foreword.engine.policy.controller import PolicyFileController
from foreword.learn.learner import HeadLearner
from foreword.learn.policy import drafter_name, policy_document, write_policy
from foreword.learn.rollout import VersionRollouts
from foreword.learn.settings import LearnSettings
from foreword.learn.texts import ServedTexts
from foreword.learn.training import LOG, Trainee, Trainings
from foreword.learn.versions import Versions
from foreword.learn.work import OrderedWork
from foreword.train.texts.documents import HELD_OUT
from helpers.clocks import ScriptedClock
from helpers.tiny_heads import TinyHead

MODEL = "0123456789abcdef"


class AtOnce(OrderedWork):
    """Work that is done when it is added, unless the test holds it back."""

    is_held: bool = False

    def __init__(self) -> None:
        self._held: list[Callable[[], None]] = []
        self._is_running = False

    def add(self, work: Callable[[], None]) -> None:
        self._held.append(work)
        if not self.is_held:
            self.release()

    def release(self) -> None:
        """Do what was held back."""
        self.is_held = False
        while self._held and not self._is_running:  # work that work adds comes after it
            self._is_running = True
            try:
                self._held.pop(0)()
            finally:
                self._is_running = False

    def close(self) -> None:
        self.release()


@dataclass
class FakeProcess:
    """A training that ends when the test says so."""

    arguments: Sequence[str]
    head: Path
    calls: list[str] = field(default_factory=list)
    code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def kill(self) -> None:
        self.calls.append("kill")
        self.code = -9

    def wait(self) -> None:
        assert self.code is not None

    def option(self, name: str) -> str:
        return self.arguments[list(self.arguments).index(name) + 1]

    def end_well(self, before: float | None, after: float) -> None:
        """End as `foreword train` does."""
        (self.head / "training").mkdir(parents=True)
        (self.head / "training/state.pt").write_bytes(b"state")
        TinyHead(vocab=60).eagle3().save(self.head)
        entries = [] if before is None else [{"step": 0, "set": HELD_OUT, "tau": before}]
        entries += [{"step": 9, "loss": 1.0}, {"step": 9, "set": HELD_OUT, "tau": after}]
        log = "".join(json.dumps(entry) + "\n" for entry in entries)
        (self.head / "training/log.jsonl").write_text(log, encoding="utf-8")
        self.code = 0


class PlayedController:
    """The part of a policy file's controller that the learner reads; it adopts the file when the test says so."""

    def __init__(self, path: Path, clock: ScriptedClock) -> None:
        self._path, self._clock = path, clock
        self.document: PolicyFile = read_policy(path)
        self.rollouts = SimpleNamespace(pairs={})

    def adopt(self) -> set[str]:
        """Use the file's drafters; return their names."""
        self.document = read_policy(self._path)
        old = self.rollouts.pairs
        self.rollouts.pairs = {}
        for rule in self.document.rollouts:
            key = rule.drafter, rule.cohort
            if (pair := old.get(key)) is None:
                pair = PairRollout(rule, self._clock)
                pair.begin()
            self.rollouts.pairs[key] = pair
        return set(self.document.drafters)


class LearnWorld:
    """A learner, its clock and its processes."""

    def __init__(
        self,
        folder: Path,
        first_head: Path | None = None,
        clock: ScriptedClock | None = None,
        controller: PolicyFileController | None = None,
        **settings: Any,
    ) -> None:
        """With the controller of an engine, the roll-outs are real."""
        self.settings = LearnSettings(str(folder), **{"min_tokens": 100, "text_tokens": 200, **settings})
        self.clock = clock or ScriptedClock(now=1000.0)
        self.processes: list[FakeProcess] = []
        self.emptied: list[int | None] = []  # version in use whenever the prefix cache was emptied
        folder.mkdir(exist_ok=True)
        if controller is None:
            write_policy(self.settings.policy_path, policy_document({}, {}, self.settings))
        self.controller = PlayedController(self.settings.policy_path, self.clock)
        self.work = AtOnce()
        trainee = Trainee("model", MODEL, "cpu", is_shared=True)
        self.texts = ServedTexts(self.settings, self.clock)
        self.trainings = Trainings(self.settings, trainee, self._start, self.clock, self.work)
        self.versions = Versions(folder, MODEL, "here")
        rollouts = VersionRollouts(
            self.versions,
            controller or self.controller,  # type: ignore[arg-type]
            self.settings,
            self.clock,
            lambda head: {"method": "eagle3", "model": str(head)},
            lambda: self.emptied.append(self.versions.current),
        )
        self.learner = HeadLearner(
            self.settings, self.texts, self.trainings, rollouts, first_head, self.clock, self.clock
        )

    def _start(self, arguments: Sequence[str], head: Path, log: Path, nice: int) -> FakeProcess:
        assert nice == 19 and log == self.settings.home / LOG
        self.processes.append(FakeProcess(arguments, head))
        return self.processes[-1]

    @property
    def process(self) -> FakeProcess:
        return self.processes[-1]

    def serve(self, count: int, tenant: str = "", answer: int = 20) -> None:
        """Keep texts with different prompts."""
        for _ in range(count):
            number = self.texts._numbers
            self.texts.add([number, 1, 2], list(range(answer)), tenant, 0.0)

    def idle(self, seconds: float = 1.0, times: int = 1) -> None:
        for _ in range(times):
            self.clock.pass_by(seconds)
            self.learner.idle()

    def train(self, before: float | None = 2.0, after: float = 2.5) -> None:
        """Serve enough for a training, which ends well."""
        self.serve(40)
        self.idle(times=2)
        self.process.end_well(before, after)
        self.idle()

    def move(self, number: int, stage: Stage, reason: str = "played") -> None:
        """Let the roll-out of a version reach a stage."""
        self.controller.rollouts.pairs[drafter_name(number), OTHER].move(stage, reason)

    def roll_out(self, number: int) -> None:
        self.controller.adopt()
        self.move(number, Stage.ON)
        self.idle(times=2)
        self.controller.adopt()

    def train_and_use(self, number: int) -> None:
        """Train a version and roll it out."""
        self.train()
        assert self.versions.candidate == number
        self.roll_out(number)
        assert self.versions.current == number
