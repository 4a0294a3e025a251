"""An engine with a policy file, on a clock that passes and drafters turn, for one cohort of scripted answers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreword.acceptance.params import SamplingParams
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.control.policy import MeasuredPolicy
from foreword.control.rollout.pair import PairRollout
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.guard import GuardedDrafter
from foreword.engine.background import BackgroundWork
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest, RequestLabels
from foreword.engine.policy.controller import PolicyFileController
from foreword.engine.text import Vocabulary
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from helpers.clocks import ScriptedClock
from helpers.scripted_target import ScriptedTarget, prompt_of

VOCAB, SCRIPTS, LENGTH = 20, 30, 80
PASS, ROW = 5e-3, 1e-4  # seconds
TEXTS = np.random.default_rng(7).integers(0, VOCAB, (SCRIPTS, LENGTH))


class TimedTarget(ScriptedTarget):
    """A pass takes what it takes on the clock."""

    is_shape_invariant = True

    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__(TEXTS, (TEXTS + 1) % VOCAB, VOCAB, context_length=200)
        self._clock = clock

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        self._clock.pass_by(PASS + ROW * len(batch.token_ids))
        return super().forward(batch, store)


@dataclass
class Guesser(Drafter):
    """Knows the scripts, and may be bad in one way or another."""

    clock: ScriptedClock
    right: float = 0.9
    seconds: float = 5e-5  # of a call
    crashes: bool = False
    memory: int = 0

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        self.clock.pass_by(self.seconds)
        if self.crashes:
            raise RuntimeError("planted")
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftTask) -> Draft:
        request = ask.request
        tokens = list(request.tokens)
        script = sum(tokens[place] * VOCAB**place for place in range(3))
        first = len(tokens) - request.prompt_len
        truth = TEXTS[script, first : first + min(ask.max_depth, ask.max_nodes)].tolist()
        wrong = np.random.default_rng(first).random(len(truth)) > self.right
        guesses = [(t + 1) % VOCAB if bad else t for t, bad in zip(truth, wrong, strict=True)]
        return Draft.chain(guesses, len(tokens), request.epoch)

    def forget(self, request: DraftRequest) -> None:
        pass

    def memory_bytes(self) -> int:
        return self.memory


POLICY: dict[str, Any] = {
    "version": 1,
    "drafters": {"fresh": {"method": "ngram", "num_speculative_tokens": 5}},
    "cohorts": [{"name": "code", "match": {"metadata.task": "code"}, "drafters": []}],
    "rollout": {
        "pair": ["fresh", "code"],
        "steps": [50, 100],
        "min_levels": 150,
        "verify_samples": 4,
        "min_requests": 12,
        "min_passes": 100,
        "guards": {"memory_bytes": 1_000_000},
    },
    "state_file": "state.json",
}


class RolloutWorld:
    """Sends request after request; between them the engine has time."""

    def __init__(
        self,
        folder: Path,
        guesser: Callable[[ScriptedClock], Guesser],
        policy: Any = None,
        rule: str = "coupled",
        temperature: float = 0.0,
        tokens: int = LENGTH - 10,
    ) -> None:
        self._temperature = temperature
        self._tokens = tokens  # of every answer
        self.clock = ScriptedClock(tick=1e-6)
        self.path = folder / "policy.json"
        self.path.write_text(json.dumps(policy or POLICY), encoding="utf-8")
        self.measured = MeasuredPolicy()
        self.guesser = guesser(self.clock)
        self.policy_file = PolicyFileController(
            self.path, self.measured, self.clock, {"model": "m"}, wall_clock=self.clock, background=AtOnce()
        )
        parts = EngineParts(
            EngineConfig(kv_cache_memory_bytes=1 << 16, acceptance_rule=rule),
            self.measured,
            self._build,
            clock=self.clock,
            offered=list(self.policy_file.configs.values()),
            policy_file=self.policy_file,
        )
        self.core = EngineCore(TimedTarget(self.clock), Vocabulary(VOCAB, frozenset()), parts)
        self.sent = 0

    def _build(self, config: SpeculationConfig) -> GuardedDrafter:
        return GuardedDrafter(self.guesser, "+".join(config.method))

    @property
    def pair(self) -> PairRollout:
        return self.policy_file.rollouts.pairs["fresh", "code"]

    def answer(self, idle: bool = True) -> list[int]:
        """One request from its arrival to its end, then whatever the engine does with its time."""
        self.sent += 1
        script = self.sent % SCRIPTS
        new = NewRequest(
            f"request-{self.sent}",
            prompt_of(script, VOCAB),
            SamplingParams(temperature=self._temperature, max_tokens=self._tokens),
            labels=RequestLabels(metadata={"task": "code"}),
        )
        (request,) = self.core.add(new)
        self._run()
        if not self._temperature:
            assert request.output_ids == TEXTS[script, : self._tokens].tolist()
        for _ in range(3 * idle):
            self.core.use_idle_time()
            self._run()
        return request.output_ids

    def run_until(self, done: Callable[[], bool], most: int = 200) -> None:
        for _ in range(most):
            if done():
                return
            self.answer()
        raise AssertionError(f"{self.pair.stage}: {self.pair.reason} after {most} requests")

    def _run(self) -> None:
        while self.core.has_requests:
            self.core.step()


class AtOnce(BackgroundWork):
    """Work that is done when it is started."""

    def start(self, work: Callable[[], None], name: str = "") -> None:
        work()
