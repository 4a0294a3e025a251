"""All roll-outs of an engine."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

from foreword.control.policy_file.document import RolloutRule, Stage
from foreword.control.rollout import saved
from foreword.control.rollout.pair import PairRollout

SAVE_SECONDS = 30.0

Pair = tuple[str, str]
"""Names of a drafter and a cohort."""


@dataclass
class Rollouts:
    """Pairs in roll-out, or stopped by hand; all other drafters are used without restrictions."""

    made_for: Mapping[str, str] = field(default_factory=dict)  # model, device and version
    path: Path | None = None  # saved state; None: not saved
    clock: Callable[[], float] = time  # seconds since 1970
    pairs: dict[Pair, PairRollout] = field(default_factory=dict)
    _saved_at: float = 0.0

    def follow(self, rules: Iterable[RolloutRule]) -> None:
        """Apply the file's rules: known pairs keep their stage unless their salt changed."""
        before, pairs = dict(self.pairs), {}
        was_saved = {} if self.path is None or before else saved.read(self.path, self.made_for)
        for rule in rules:
            key = (rule.drafter, rule.cohort)
            known = before.pop(key, None)
            if known is not None and known.rule.salt == rule.salt:
                known.rule, known.step = rule, min(known.step, len(rule.steps) - 1)
                pairs[key] = known
            else:
                if known is not None:
                    known.switch.is_closed = True
                pairs[key] = self._fresh(rule, was_saved.pop(key, None))
        for key, known in before.items():
            if known.by_hand:
                pairs[key] = known
        for key, state in was_saved.items():
            if state["by_hand"]:
                pairs[key] = self._fresh(RolloutRule(*key), state, by_hand=True)
        self.pairs = pairs  # replaced atomically: other threads read it

    def _fresh(self, rule: RolloutRule, state: dict[str, Any] | None, by_hand: bool = False) -> PairRollout:
        pair = PairRollout(rule, self.clock, by_hand)
        if state is not None and state["salt"] == rule.salt:
            saved.restore(pair, state)
        else:
            pair.begin()
        return pair

    def set_stage(self, drafter: str, cohort: str, stage: str) -> None:
        """Set a stage on the operator's request."""
        pair = self.pairs.get((drafter, cohort))
        if pair is None:
            pair = PairRollout(RolloutRule(drafter, cohort), self.clock, by_hand=True)
            self.pairs = {**self.pairs, (drafter, cohort): pair}
        if stage == "next":
            pair.promote()
        else:
            pair.move(Stage(stage), "by hand")
        self.save()

    def save(self, is_due: bool = True) -> None:
        """Save the state; without `is_due`, only if the last save is old."""
        now = self.clock()
        if self.path is not None and (is_due or now - self._saved_at >= SAVE_SECONDS):
            self._saved_at = now
            saved.save(self.path, self.made_for, self.pairs.values())
