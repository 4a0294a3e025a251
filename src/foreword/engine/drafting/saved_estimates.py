"""Saves estimates and costs for the next engine with the same model, device and version."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from foreword.control.policy import MeasuredPolicy
from foreword.speculation.measured.costs import StepCosts

_log = logging.getLogger(__name__)

FORMAT = 2  # format number, part of the file name, so that other formats are ignored
FIRST_SECONDS, MOST_SECONDS = 2.0, 30.0
"""Seconds of steps before the first save, and the maximum between two saves; the time doubles with every save."""

MOST_BYTES = 4_000_000  # maximum file size in bytes
MOST_FILES = 32  # maximum files per folder; the oldest are removed


class SavedEstimates:
    """A file of estimates and costs. A file that cannot be used is logged and ignored."""

    def __init__(self, path: Path, policy: MeasuredPolicy, costs: StepCosts) -> None:
        self._path = path
        self._policy = policy
        self._costs = costs
        self._pause = FIRST_SECONDS  # seconds of steps before the next save
        self._saved_at = 0.0  # total step time at the last periodic save
        self._saved_steps = 0  # the policy's steps at the last save

    def load(self, are_current: Callable[[StepCosts], bool] = lambda _: True) -> bool:
        """Restore the estimates, and the costs if `are_current` returns True; return whether costs were restored."""
        try:
            if self._path.stat().st_size > MOST_BYTES:
                raise ValueError("it is too large")
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            if not isinstance(saved, dict) or saved.get("key") != self._path.stem:
                raise ValueError("it was written for something else")
            restored = StepCosts()
            restored.restore(saved["costs"])  # raises before anything is used if the costs are invalid
            self._policy.estimates.restore(saved["estimates"])
            if not are_current(restored):
                _log.info(
                    "costs saved in %s are not used and are measured again: a pass now takes a different time",
                    self._path,
                )
                return False
            self._costs.restore(saved["costs"])
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, OverflowError, RecursionError) as error:
            _log.warning("saved estimates are not used: %s: %s", self._path, error)
            return False
        return True

    def save_if_due(self, seconds: float) -> None:
        """Save periodically; called after every step with the total step seconds."""
        if seconds - self._saved_at >= self._pause:
            self._saved_at, self._pause = seconds, min(2 * self._pause, MOST_SECONDS)
            self.save()

    def save(self) -> None:
        """Write the file if anything was learned since the last save."""
        if self._policy.steps == self._saved_steps:
            return
        self._saved_steps = self._policy.steps
        saved = {
            "key": self._path.stem,
            "costs": self._costs.as_json(),
            "estimates": self._policy.estimates.as_json(self._policy.seconds),
        }
        write_atomically(self._path, json.dumps(saved))


def write_atomically(path: Path, text: str) -> None:
    """Write the whole file or nothing, and remove old JSON files of its folder; failures are only logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
        by_age = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in by_age[:-MOST_FILES]:
            file.unlink(missing_ok=True)
    except OSError as error:
        _log.info("%s was not written: %s", path, error)
