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
"""Minimum seconds between two periodic saves."""

Pair = tuple[str, str]
"""Names of a drafter and a cohort."""


@dataclass
class Rollouts:
    """Roll-outs by drafter and cohort. A drafter without a roll-out may be used for all requests of a cohort."""

    environment: Mapping[str, str] = field(default_factory=dict)  # model, device and version
    path: Path | None = None  # saved state; None: not saved
    clock: Callable[[], float] = time  # seconds since 1970
    pairs: dict[Pair, PairRollout] = field(default_factory=dict)
    _saved_at: float = 0.0

    def apply_rules(self, rules: Iterable[RolloutRule]) -> None:
        """Apply the rules of the policy file. A pair keeps its stage unless its salt changed."""
        old_pairs, pairs = dict(self.pairs), {}
        # The saved state is read once, before the first rules are applied.
        saved_states = {} if self.path is None or old_pairs else saved.read(self.path, self.environment)
        for rule in rules:
            key = (rule.drafter, rule.cohort)
            pair = old_pairs.pop(key, None)
            if pair is not None and pair.rule.salt == rule.salt:
                pair.rule, pair.step = rule, min(pair.step, len(rule.steps) - 1)
                pairs[key] = pair
            else:
                if pair is not None:
                    pair.switch.is_off = (
                        True  # stop the drafter for requests that have a gate of the old pair
                    )
                pairs[key] = self._fresh(rule, saved_states.pop(key, None))
        for key, pair in old_pairs.items():
            if pair.by_hand:
                pairs[key] = pair
        for key, state in saved_states.items():
            if state["by_hand"]:
                pairs[key] = self._fresh(RolloutRule(*key), state, by_hand=True)
        self.pairs = pairs  # replaced atomically: other threads read it

    def _fresh(self, rule: RolloutRule, state: dict[str, Any] | None, by_hand: bool = False) -> PairRollout:
        """Return a new roll-out, with its saved state if that has the same salt."""
        pair = PairRollout(rule, self.clock, by_hand)
        if state is not None and state["salt"] == rule.salt:
            saved.restore(pair, state)
        else:
            pair.begin()
        return pair

    def set_stage(self, drafter: str, cohort: str, stage: str) -> None:
        """Move a pair to a stage, or with `next` to the next one, on the operator's request."""
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
        """Save the state; unless `is_due`, only if the last save is at least `SAVE_SECONDS` old."""
        now = self.clock()
        if self.path is not None and (is_due or now - self._saved_at >= SAVE_SECONDS):
            self._saved_at = now
            saved.save(self.path, self.environment, self.pairs.values())
