"""All roll-outs of an engine, and their saved state: a JSON file, ignored if it is damaged or of another model."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import time
from typing import Any

from foreword.control.policy_file.document import RolloutRule, Stage
from foreword.control.rollout.distributions import DistributionComparison
from foreword.control.rollout.pair import Move, PairRollout

_log = logging.getLogger(__name__)

VERSION = 1  # format version of the file

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
        saved_states = {} if self.path is None or old_pairs else _read_states(self.path, self.environment)
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
            _restore(pair, state)
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
            _write_states(self.path, self.environment, self.pairs.values())


def _write_states(path: Path, environment: Mapping[str, str], pairs: Iterable[PairRollout]) -> None:
    """Write the state of all pairs atomically; errors are only logged."""
    value = {"version": VERSION, "made_for": dict(environment), "pairs": [_as_json(pair) for pair in pairs]}
    try:
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        _log.warning("the state of roll-outs is not saved: %s", error)


def _read_states(path: Path, environment: Mapping[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the saved state of every (drafter, cohort) pair; empty, with a log line, if the file cannot be used."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["version"] != VERSION or value["made_for"] != dict(environment):
            raise ValueError("it is of another model, device or version")
        return {(str(pair["drafter"]), str(pair["cohort"])): _checked(pair) for pair in value["pairs"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        prefix = "it has no" if isinstance(error, KeyError) else ""
        why = " ".join(f"{prefix} {error}".split()) or "damaged"
        _log.warning("%s is ignored%s, roll-outs begin anew: %s", path, _rename_unusable(path), why)
        return {}


def _rename_unusable(path: Path) -> str:
    """Rename a file, so that the next save does not replace it, unless an earlier one was renamed.

    Return what happened, for the log.
    """
    renamed = path.with_name(f"{path.name}.ignored")
    try:
        if path.is_file() and not renamed.exists():
            path.replace(renamed)
            return f" and kept as {renamed.name}"
    except OSError as error:
        return f" (it cannot be kept as {renamed.name}: {error.strerror})"
    return ""


def _as_json(pair: PairRollout) -> dict[str, Any]:
    return {
        "drafter": pair.rule.drafter,
        "cohort": pair.rule.cohort,
        "salt": pair.rule.salt,
        "by_hand": pair.by_hand,
        "stage": pair.stage.value,
        "step": pair.step,
        "since": pair.since,
        "reason": pair.reason,
        "verified": pair.decoded_again,
        "mismatches": pair.mismatches,
        "plain_mismatches": pair.plain_mismatches,
        "laws": pair.distributions.as_json(),
        "moves": [asdict(move) for move in pair.moves],
    }


def _checked(pair: Mapping[str, Any]) -> dict[str, Any]:
    """Return the typed values of a saved pair; raise an exception for an invalid one."""
    counts = {name: int(pair[name]) for name in ("step", "verified", "mismatches", "plain_mismatches")}
    if min(counts.values()) < 0:
        raise ValueError("a count is negative")
    distributions = DistributionComparison()
    if "laws" in pair:  # older files do not have it
        distributions = DistributionComparison.from_json(pair["laws"])
    return counts | {
        "salt": str(pair["salt"]),
        "since": float(pair["since"]),
        "reason": str(pair["reason"]),
        "stage": Stage(pair["stage"]),
        "by_hand": bool(pair["by_hand"]),
        "moves": [
            Move(float(move["at"]), Stage(move["stage"]), float(move["percent"]), str(move["reason"]))
            for move in pair["moves"]
        ],
        "distributions": distributions,
    }


def _restore(pair: PairRollout, state: Mapping[str, Any]) -> None:
    """Set a pair to its saved state. The results of a canary step are not saved, so the step starts again."""
    pair.stage, pair.since, pair.reason = state["stage"], state["since"], state["reason"]
    pair.step = min(state["step"], len(pair.rule.steps) - 1)
    pair.decoded_again, pair.mismatches = state["verified"], state["mismatches"]
    pair.plain_mismatches, pair.distributions = state["plain_mismatches"], state["distributions"]
    pair.moves.clear()
    pair.moves.extend(state["moves"])
    pair.switch.is_off = pair.stage in (Stage.OFF, Stage.HELD)
