"""Keeps the policy file up to date: it names the version in use and the candidate; roll-outs move them on."""

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.control.policy_file.document import OTHER, Stage
from foreword.control.rollout.pair import PairRollout
from foreword.engine.learning import VersionReport
from foreword.engine.policy.controller import PolicyFileController
from foreword.errors import RequestError
from foreword.learn.policy import drafter_name, policy_document, write_policy
from foreword.learn.settings import LearnSettings
from foreword.learn.versions import HeadVersion, Versions

_log = logging.getLogger(__name__)


@dataclass
class VersionRollouts:
    """Moves versions between candidate and in use, by the stages of their roll-outs. Used in the engine's thread."""

    versions: Versions
    controller: PolicyFileController  # of the engine; reads the file that this object writes
    settings: LearnSettings
    clock: Callable[[], float]  # seconds
    configure: Callable[[Path], dict[str, Any]]  # the drafter's configuration with the head in a directory
    # Empties the prefix cache: its pages have no rows of a head that was loaded later, and no request would add them.
    forget_prefixes: Callable[[], None] = lambda: None
    _written: Mapping[str, Any] = field(init=False)  # contents of the file
    _written_at: float = 0.0
    _attempts: int = 0  # how often the same contents were written

    def __post_init__(self) -> None:
        self._written = self._document({})  # `LearnSetup.prepare` has written it

    @property
    def is_settled(self) -> bool:
        """Whether no version is being rolled out or loaded."""
        return self.versions.candidate is None and self._adopted == self._wanted.keys()

    @property
    def _wanted(self) -> dict[str, int]:
        """The versions that the engine should use, by name."""
        both = (self.versions.current, self.versions.candidate)
        return {drafter_name(number): number for number in sorted(n for n in both if n is not None)}

    @property
    def _adopted(self) -> Set[str]:
        """The names in the file that the engine uses; it has loaded their heads."""
        return self.controller.document.drafters.keys()

    def check(self) -> None:
        """Follow the stages of roll-outs, and write the policy file if it must change."""
        self._follow_candidate()
        self._follow_current()
        self._write_file()

    def _pair(self, number: int) -> PairRollout | None:
        """Return the roll-out of a version; None: the engine has not loaded it."""
        name = drafter_name(number)
        return self.controller.rollouts.pairs.get((name, OTHER)) if name in self._adopted else None

    def _follow_candidate(self) -> None:
        number = self.versions.candidate
        pair = None if number is None else self._pair(number)
        if number is None or pair is None:
            return
        if pair.stage is Stage.ON:
            _log.info("version %d of the head is in use", number)
            self.versions.promote()
            self.forget_prefixes()
            self.versions.prune(self.settings.kept_versions)
        elif pair.stage in (Stage.OFF, Stage.HELD):
            _log.info("version %d of the head is not used: %s", number, pair.reason)
            self.versions.drop(number, pair.stage.value, pair.reason)

    def _follow_current(self) -> None:
        number = self.versions.current
        pair = None if number is None else self._pair(number)
        if number is not None and pair is not None and pair.stage in (Stage.OFF, Stage.HELD):
            _log.warning("version %d of the head is no longer used: %s", number, pair.reason)
            self.versions.drop(number, pair.stage.value, pair.reason)

    def _write_file(self) -> None:
        """Write the file if its contents change, or if the engine has not adopted them for some time.

        Versions that must go leave the file first: their KV rows may be needed for the others.
        """
        adopted, wanted = self._adopted, self._wanted
        if not adopted <= wanted.keys():
            wanted = {name: number for name, number in wanted.items() if name in adopted}
        document = self._document(wanted)
        is_late = adopted != wanted.keys() and self.clock() - self._written_at >= self.settings.reload_pause
        if document == self._written and not is_late:
            return
        self._attempts = self._attempts + 1 if document == self._written else 1
        if self._attempts > self.settings.reload_attempts and wanted:
            self._attempts = 0
            self.versions.drop(max(wanted.values()), "held", "the engine could not load it; see its log")
            return
        try:
            write_policy(self.settings.policy_path, document)
        except RequestError as error:  # no fault of a version, so it is no attempt
            self._attempts -= 1
            _log.warning("versions of the head stay as they are: %s", error)
        self._written, self._written_at = document, self.clock()

    def _document(self, versions: Mapping[str, int]) -> dict[str, Any]:
        """Return the policy file that names these versions."""
        drafters = {name: self.configure(self.versions.path(number)) for name, number in versions.items()}
        current = self.versions.current
        starts = {name: "on" if number == current else "shadow" for name, number in versions.items()}
        return policy_document(drafters, starts, self.settings)

    def reports(self) -> tuple[VersionReport, ...]:
        """Return the kept versions, oldest first."""
        return tuple(self._report(version) for _, version in sorted(self.versions.all.items()))

    def _report(self, version: HeadVersion) -> VersionReport:
        stage, reason = self._stage(version.number)
        return VersionReport(
            number=version.number,
            stage=stage,
            reason=reason,
            created=version.created,
            tokens=version.tokens,
            train_seconds=version.train_seconds,
            tau_before=version.tau_before,
            tau_after=version.tau_after,
        )

    def _stage(self, number: int) -> tuple[str, str]:
        """Return a version's stage and the reason."""
        if (dropped := self.versions.dropped.get(number)) is not None:
            return dropped.stage, dropped.reason
        if number not in self._wanted.values():
            return Stage.OFF.value, "a newer version is used"
        pair = self._pair(number)
        return (Stage.OFF.value, "it is being loaded") if pair is None else (pair.stage.value, pair.reason)
