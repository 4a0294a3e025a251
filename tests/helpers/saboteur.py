"""Faults planted in every stage of a step."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from foreword.acceptance.judge import Judging
from foreword.engine.core import EngineCore
from foreword.engine.requests.request import Request
from foreword.kv.sequence import KvSequence

ONLY_GUESSES = ("plan", "nonsense plan", "propose", "nonsense drafts", "forget")
"""Stages whose faults cost guesses at most."""

ANOTHER_TRY = ("reserve", "verify", "torn verify", "late verify", "judge", "kept")
"""Stages whose faults cost a try: with guesses, without, then one request alone, which is lost if that fails too."""

THE_REQUEST = ("commit", "cache commit", "publish")
"""Stages whose faults come too late for another try: the request that they hit is lost, and nobody else."""

STAGES = (*ONLY_GUESSES, *ANOTHER_TRY, *THE_REQUEST)


class PlantedError(Exception):
    """Not a real fault."""


class Saboteur:
    """Makes one stage of a step fail, once or several times, and knows what that may cost."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._rng = rng
        self._share = share  # of the steps that are sabotaged
        self._stage = ""
        self._strikes_left = 0
        self._strikes = 0
        self.victims: list[KvSequence] = []  # of this step, where the fault hits one request
        self.struck: Counter[str] = Counter()

    def arm(self) -> None:
        """Before a step."""
        self._stage, self._strikes, self.victims = "", 0, []
        self._strikes_left = self._rng.choice((1, 1, 2, 3, 4))
        if self._rng.random() < self._share:
            self._stage = self._rng.choice((*STAGES, *ANOTHER_TRY, *["forget"] * 4))  # few requests end

    def disarm(self) -> None:
        """Behind a step."""
        self._strikes_left = 0

    @property
    def is_at_work(self) -> bool:
        """Whether anything is to fail in this step."""
        return bool(self._stage)

    def is_due(self, stage: str) -> bool:
        """Whether a fault of the stage is to happen now."""
        return stage == self._stage and self._strikes_left > 0

    def note(self, stage: str) -> None:
        """The fault happens now."""
        self._strikes_left -= 1
        self._strikes += 1
        self.struck[stage] += 1

    def strike(self, stage: str) -> None:
        """Fail if the fault is due."""
        if self.is_due(stage):
            self.note(stage)
            raise PlantedError(stage)

    @property
    def has_struck(self) -> bool:
        """Whether anything failed in this step."""
        return self._strikes > 0

    @property
    def losses(self) -> int:
        """Requests that this step's faults must have cost."""
        if self._stage in THE_REQUEST:
            return len(self.victims)
        return max(0, self._strikes - 2) if self._stage in ANOTHER_TRY else 0

    def infiltrate(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in front of the stages of this engine that are not the target's or a drafter's."""

        def watched(stage: str, real: Callable[..., Any], victim: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if self.is_due(stage) and stage in THE_REQUEST:
                    self.victims.append(victim(*args))
                self.strike(stage)
                return real(*args)

            return call

        def first(first: object, *_: object) -> object:
            return first

        cache = core.cache
        monkeypatch.setattr(Judging, "verdicts", watched("judge", Judging.verdicts, first))
        made = Request.__init__

        def make(request: Request, *args: Any, **options: Any) -> None:
            made(request, *args, **options)
            request.count_kept = watched("kept", request.count_kept, lambda _: request)
            request.commit = watched("commit", request.commit, lambda _: request.kv)

        monkeypatch.setattr(Request, "__init__", make)
        monkeypatch.setattr(cache, "reserve", watched("reserve", cache.reserve, first))
        monkeypatch.setattr(cache, "commit", watched("cache commit", cache.commit, first))
        monkeypatch.setattr(cache, "publish", watched("publish", cache.publish, first))


def nonsense(rng: random.Random, drafts: Sequence[Any]) -> list[Any]:
    """The drafts, spoilt in one of many ways."""
    spoilt: list[list[Any]] = [
        list(drafts[1:]),
        [*drafts, *drafts],
        [None] * len(drafts),
        [],
        ["draft"] * len(drafts),
    ]
    return rng.choice(spoilt)
