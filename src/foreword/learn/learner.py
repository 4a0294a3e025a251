"""The learner of an engine: keeps texts, runs trainings, and rolls versions of the head out."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foreword.engine.learning import LearningReport
from foreword.engine.requests.request import Request
from foreword.errors import ForewordError
from foreword.learn.rollout import VersionRollouts
from foreword.learn.settings import LearnSettings
from foreword.learn.stored_texts import forget_stored, store_texts
from foreword.learn.texts import ServedTexts
from foreword.learn.training import TrainingJob, TrainingResult, Trainings
from foreword.learn.versions import HeadVersion, Versions

_log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # maximum seconds between two calls of an idle engine while no training runs


@dataclass
class HeadLearner:
    """Implements `foreword.engine.learner.TrafficLearner`."""

    settings: LearnSettings
    texts: ServedTexts
    trainings: Trainings
    rollouts: VersionRollouts
    first_head: Path | None  # head that the engine started with; None: none
    clock: Callable[[], float]  # seconds
    wall_clock: Callable[[], float]  # seconds since 1970
    release: Callable[[], None] = lambda: None  # unlocks the directory
    _checked_at: float = float("-inf")
    _verdict: str = ""  # why the last trained version was not kept; empty: it was
    _is_closed: bool = False

    @property
    def versions(self) -> Versions:
        return self.rollouts.versions

    @property
    def idle_seconds(self) -> float | None:
        return IDLE_SECONDS if self.trainings.job is None else self.settings.resume_after

    def busy(self) -> None:
        self.trainings.busy()
        self._check_if_due()

    def idle(self) -> None:
        self.trainings.idle()
        self._check_if_due()

    def ended(self, request: Request) -> None:
        if request.finish_reason not in ("stop", "length") or request.identity.assigned.is_replay:
            return
        if request.identity.adapter is None:
            prompt = request.tokens[: request.prompt_len]
            self.texts.add(prompt, request.output_ids, request.tenant, request.params.temperature)

    def _check_if_due(self) -> None:
        now = self.clock()
        if now - self._checked_at < self.settings.tick_seconds:
            return
        self._checked_at = now
        self.texts.expire()
        if (result := self.trainings.check()) is not None:
            self._judge(result)
        self.rollouts.check()
        is_due = self.texts.new_tokens >= self.settings.min_tokens
        if is_due and self.trainings.may_begin and self.rollouts.is_settled:
            try:
                self._begin()
            except ForewordError as error:  # the disk is full
                self.trainings.postpone(str(error))

    def _begin(self) -> None:
        """Begin a training from the version in use, the engine's first head, or a new head."""
        current = self.versions.current
        begin = self.first_head if current is None else self.versions.path(current)
        number, out = self.versions.begin()
        self._store_texts()
        self.trainings.begin(TrainingJob(number, out, current, begin, self.texts.kept()))

    def _judge(self, result: TrainingResult) -> None:
        """Roll a trained version out, or delete it if it is not better."""
        job, settings = result.job, self.settings
        self.texts.trained(result.texts)
        least = settings.least_first_tau if job.begin is None else settings.least_gain * result.tau_before
        self._verdict = ""
        if not result.tau_after >= least:  # also if it is not a number
            self._verdict = (
                f"version {job.number} was not kept: {result.tau_after:.3f} tokens per pass on held-out texts, "
                f"at least {least:.3f} were needed"
            )
            _log.info(self._verdict)
            self.versions.discard(job.out)
            return
        parents = () if job.parent is None else self.versions.all[job.parent].tenants
        version = HeadVersion(
            number=job.number,
            parent=job.parent,
            created=self.wall_clock(),
            tenants=tuple(sorted({*result.texts.tenants, *parents})),
            texts=len(result.texts.documents),
            tokens=result.texts.new_tokens,
            tau_before=result.tau_before,
            tau_after=result.tau_after,
            train_seconds=result.train_seconds,
        )
        try:
            self.versions.publish(job.out, version)
        except (OSError, ForewordError) as error:
            self.versions.discard(job.out)
            self.trainings.postpone(f"version {job.number} was not kept: {error}")
            return
        self.versions.prune(settings.kept_versions)

    def act(self, action: str, tenant: str) -> None:
        try:
            if action == "rollback":
                self.trainings.stop()  # it begins from the version that is rolled back
                self.versions.roll_back("rolled back by hand")
                _log.info("learning: rolled back; %s is in use", self._head_in_use)
            elif action == "forget":
                self._forget(tenant)
                name = tenant or "without an API key"
                _log.info("learning: the tenant %s is forgotten; %s is in use", name, self._head_in_use)
            else:
                _log.warning("learning: unknown action %r", action)
                return
            self.rollouts.check()
        except Exception as error:  # it must not end the engine's thread
            _log.error("learning: %s failed: %s", action, error, exc_info=error)

    def _forget(self, tenant: str) -> None:
        job = self.trainings.job
        if job is not None and job.kept.has(tenant):
            self.trainings.stop()
        self.texts.forget(tenant)
        self.trainings.work.add(lambda: forget_stored(self._texts_folder, tenant))
        if self.versions.forget(tenant) and self.trainings.job is not None:
            self.trainings.stop()  # the version from which it begins may be deleted

    @property
    def _head_in_use(self) -> str:
        current = self.versions.current
        return "the initial head" if current is None else f"version {current} of the head"

    @property
    def _texts_folder(self) -> Path:
        return self.settings.home / "texts"

    def _store_texts(self) -> None:
        """Store the kept texts if wanted, in the thread."""
        if not self.settings.keeps_texts:
            return
        texts = tuple(self.texts)

        def store() -> None:
            try:
                store_texts(self._texts_folder, texts, self.trainings.trainee.identity)
            except ForewordError as error:
                _log.warning("the texts are not stored: %s", error)

        self.trainings.work.add(store)

    def report(self) -> LearningReport:
        trainings, texts = self.trainings, self.texts
        train_seconds, busy_seconds = trainings.seconds
        return LearningReport(
            state=self._state(),
            reason=trainings.reason or self._verdict,
            texts=len(texts),
            tokens=texts.tokens,
            new_tokens=texts.new_tokens,
            wanted_tokens=self.settings.min_tokens,
            trainings=trainings.ended,
            failures=trainings.failures,
            train_seconds=train_seconds,
            busy_seconds=busy_seconds,
            version=self.versions.current,
            versions=self.rollouts.reports(),
        )

    def _state(self) -> str:
        if self.trainings.job is not None:
            return "paused" if self.trainings.is_paused else "training"
        if self.versions.candidate is not None:
            return "rolling out"
        return "failed" if self.trainings.reason else "collecting"

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.trainings.stop()
            self.versions.save(is_closed=True)  # first: storing texts may last until the process is killed
        except ForewordError as error:
            _log.warning("the state of learning is not saved: %s", error)
        try:
            self._store_texts()
            self.trainings.close()
        finally:
            self.release()
