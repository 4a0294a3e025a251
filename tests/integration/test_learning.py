"""A head that adapts to the traffic: real trainings and roll-outs of a tiny model, and those of a scripted one."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from foreword.acceptance.params import SamplingParams
from foreword.control.policy_file.document import Stage
from foreword.engine.assembly import load_core
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.learning import LearningReport
from foreword.engine.messages import NewRequest
from foreword.errors import RequestError
from foreword.learn.factory import LearnSetup
from foreword.learn.learner import HeadLearner
from foreword.learn.policy import policy_document
from foreword.learn.settings import LearnSettings
from foreword.learn.trainer import check_finite
from helpers.clocks import ScriptedClock
from helpers.learn_world import LearnWorld
from helpers.rollout_world import Guesser, RolloutWorld
from helpers.tiny_heads import TinyHead
from helpers.waiting import PATIENCE, wait_until

PROMPTS = [(number, 7, 3) for number in range(24)]
QUICK: dict[str, Any] = {
    "min_tokens": 400,
    "least_first_tau": 0.5,
    "tick_seconds": 0.02,
    "reload_pause": 2.0,
    "min_steps": 2,
    "wanted_steps": 2,
    "first_passes": 2,
    "batch_tokens": (512, 1024),
    "verify_samples": 3,
    "nice": 0,
}


class LearningEngine:
    """An engine with a learner and real trainings, stepped by the test."""

    def __init__(self, model: Path, folder: Path, **settings: Any) -> None:
        self.settings = LearnSettings(str(folder), **{**QUICK, **settings})
        setup = LearnSetup.prepare(self.settings)
        config = EngineConfig(kv_cache_memory_bytes=1 << 24, **setup.engine_config)
        speculation = {"method": "suffix"}
        loaded, self.core = load_core(str(model), config, speculation, None, dtype="float32", device="cpu")
        setup.attach(loaded, self.core)
        self._sent = 0

    def report(self) -> LearningReport:
        report = self.core.stats().learning
        assert report is not None
        return report

    def texts(self) -> list[list[int]]:
        return texts(self.core)

    def wait_until(self, done: Any) -> None:
        """Let the engine work without requests; wait until something holds."""
        deadline = time.monotonic() + 2 * PATIENCE
        while not done():
            assert time.monotonic() < deadline, self.report()
            self.core.use_idle_time()
            self.core.step()
            time.sleep(0.005)

    def train(self) -> None:
        """Serve enough texts for a training, and wait until its version is loaded."""
        self.texts()
        self.wait_until(lambda: self.stage(1) == "shadow")

    def stage(self, number: int) -> str:
        return {version.number: version.stage for version in self.report().versions}.get(number, "")

    def move(self, number: int, stage: Stage) -> None:
        self.core.speculation_monitor.move(f"learned-{number}", "other", stage)


def texts(core: EngineCore) -> list[list[int]]:
    """Answers to all prompts, greedy ones and sampled ones."""
    requests = [
        core.add(NewRequest(f"request {index}", prompt, _params(index)))
        for index, prompt in enumerate(PROMPTS)
    ]
    while core.has_requests:
        core.step()
    return [request.output_ids for (request,) in requests]


def _params(index: int) -> SamplingParams:
    return SamplingParams(temperature=index % 2, seed=index, max_tokens=20, ignore_eos=True)


@contextmanager
def learning(model: Path, folder: Path, **settings: Any) -> Iterator[LearningEngine]:
    engine = LearningEngine(model, folder, **settings)
    try:
        yield engine
    finally:
        engine.core.close()


def test_texts_are_equal_with_every_stage_of_a_version(tiny_model: Path, tmp_path: Path):
    _, plain = load_core(
        str(tiny_model),
        EngineConfig(kv_cache_memory_bytes=1 << 24),
        None,
        None,
        dtype="float32",
        device="cpu",
    )
    expected = texts(plain)
    plain.close()
    with learning(tiny_model, tmp_path / "learn") as engine:
        assert engine.texts() == expected
        engine.train()
        assert engine.texts() == expected
        engine.move(1, Stage.VERIFY)
        assert engine.texts() == expected  # they are decoded again with the head
        engine.wait_until(lambda: engine.stage(1) == "canary")
        assert engine.texts() == expected
        engine.move(1, Stage.ON)
        engine.wait_until(lambda: engine.report().version == 1)
        assert engine.texts() == expected
        drafted = [
            s.draft_requests for name, s in engine.core.situation.cohorts.items() if "learned-1" in name
        ]
        assert sum(drafted)
        engine.core.learner.act("rollback", "")  # type: ignore[union-attr]
        assert engine.report().version is None and engine.texts() == expected
        engine.core.check_integrity()
    quick: dict[str, Any] = {"reload_pause": 1.2, "reload_attempts": 2}  # loading the poisoned head fails
    with learning(tiny_model, tmp_path / "learn", min_tokens=1_000_000, **quick) as engine:
        assert engine.report().version is None and engine.stage(1) == "held"  # it is never used again
        number = _poisoned_copy(engine)
        engine.wait_until(lambda: engine.stage(number) in ("shadow", "held"))
        for _ in range(4):
            assert engine.texts() == expected
            engine.wait_until(lambda: not engine.core.has_requests)
            assert engine.stage(number) in ("shadow", "off", "held")


def test_a_killed_training_changes_nothing(tiny_model: Path, tmp_path: Path):
    with learning(tiny_model, tmp_path / "learn") as engine:
        engine.texts()
        engine.wait_until(_children)
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        engine.wait_until(lambda: engine.report().failures == 1)
        report = engine.report()
        assert report.reason == "signal 9 ended the training" and report.state == "failed"
        assert engine.texts() and not report.versions
        with pytest.raises(RequestError, match="another server learns in"):
            LearnSetup.prepare(engine.settings)


def test_closing_ends_a_paused_training(tiny_model: Path, tmp_path: Path):
    with learning(tiny_model, tmp_path / "learn", share=0.0) as engine:
        engine.texts()
        engine.wait_until(lambda: engine.report().train_seconds > 0)
        (pid,) = _children()
        engine.core.add(NewRequest("busy", (1, 2), _params(0)))
        assert engine.report().state == "paused"
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    assert not _children() and not Path(f"/proc/{pid}").exists()


def test_a_head_with_weights_that_are_not_finite_is_no_result(
    tmp_path: Path,
):
    head = TinyHead(vocab=60).eagle3()
    check_finite(head.save(tmp_path / "good"))
    head.tensors["fc.weight"][3, 5] = float("nan")
    with pytest.raises(SystemExit, match=r"not finite: fc\.weight"):
        check_finite(head.save(tmp_path / "bad"))


def _children() -> list[int]:
    """The trainings that this process has started and that have not ended."""
    threads = Path("/proc/self/task").iterdir()
    pids = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    return [pid for pid in pids if b"foreword.learn.trainer" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _poisoned_copy(engine: LearningEngine) -> int:
    """Publish a copy of version 1 with weights that are not numbers, as if its training had not found them."""
    assert isinstance(engine.core.learner, HeadLearner)
    versions = engine.core.learner.versions
    number, folder = versions.begin()
    shutil.copytree(versions.path(1), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][:] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    versions.publish(folder, replace(versions.all[1], number=number, parent=None))
    return number


STAGES_IN_USE = {Stage.VERIFY, Stage.CANARY, Stage.ON}


class TrafficWorld:
    """A scripted engine with the real roll-outs; trainings are played, and time is that of the script."""

    def __init__(self, folder: Path, guesser: Callable[[ScriptedClock], Guesser]) -> None:
        limits = {"steps": (50, 100), "min_levels": 150, "verify_samples": 4, "min_requests": 12}
        settings = LearnSettings(str(folder), min_passes=100, **limits)  # type: ignore[arg-type]
        self.engine = RolloutWorld(folder, guesser, policy_document({}, {}, settings))
        self.learn = LearnWorld(
            folder, clock=self.engine.clock, controller=self.engine.policy_file, min_passes=100, **limits
        )
        self.core.learner = self.learn.learner
        self.stages: list[str] = []

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    def answer_until(self, done: Callable[[], bool], most: int = 300) -> None:
        """Answer requests, whose texts are checked; record the stages of version 1."""
        for _ in range(most):
            if done():
                return
            self.engine.answer()
            stage = {version.number: version.stage for version in self.learn.learner.report().versions}.get(1)
            if stage is not None and stage not in self.stages[-1:]:
                self.stages.append(stage)
        raise AssertionError(self.learn.learner.report())

    def train(self) -> None:
        self.answer_until(lambda: bool(self.learn.processes))
        self.learn.process.end_well(None, 1.8)


def test_a_good_version_goes_from_traffic_to_all_requests_by_itself(tmp_path: Path):
    world = TrafficWorld(tmp_path, Guesser)
    world.train()
    world.answer_until(lambda: world.learn.learner.report().version == 1)
    assert world.stages == ["off", "shadow", "verify", "canary", "on"]
    option = world.core.situation.cohorts["learned-1/other/greedy"]
    before = option.counts
    for _ in range(5):
        world.engine.answer()
    assert option.counts[2] > before[2]  # its drafts are accepted
    world.learn.learner.act("rollback", "")
    world.answer_until(lambda: not world.engine.policy_file.document.drafters)
    after = option.counts
    for _ in range(5):
        world.engine.answer()
    assert option.counts == after and world.learn.learner.report().version is None


@pytest.mark.parametrize("fault", ["wrong", "crashing"])
def test_a_bad_version_is_never_verified(tmp_path: Path, fault: str):
    def guesser(clock: ScriptedClock) -> Guesser:
        return Guesser(clock, right=0.0, crashes=fault == "crashing")

    world = TrafficWorld(tmp_path, guesser)
    world.train()
    world.answer_until(lambda: world.learn.versions.candidate is None and 1 in world.learn.versions.dropped)
    assert not STAGES_IN_USE & set(world.stages)
    assert world.core.situation.cohorts["learned-1/other/greedy"].counts[2] == 0
    assert world.learn.learner.report().version is None
    world.answer_until(lambda: not world.engine.policy_file.document.drafters)
