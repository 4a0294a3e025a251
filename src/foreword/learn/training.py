"""Runs trainings one at a time: writes their texts, starts the process, pauses it, and reads the result.

Files and processes are handled by a thread (`OrderedWork`), since they could delay the engine's steps.
"""

import json
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from foreword.errors import ForewordError
from foreword.learn.arguments import train_arguments
from foreword.learn.pausing import Pauses, TrainerProcess
from foreword.learn.process import StartTrainer
from foreword.learn.settings import LearnSettings
from foreword.learn.texts import KeptTexts, TrainingTexts
from foreword.learn.versions import keep_only_log
from foreword.learn.work import OrderedWork
from foreword.train.files import TRAINING
from foreword.train.texts.documents import HELD_OUT, write_shard

_log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
LOG = "trainer.log"


@dataclass(frozen=True)
class Trainee:
    """The model and the device of trainings."""

    model: str  # path
    identity: str
    device: str
    is_shared: bool  # the engine uses the device as well


@dataclass(frozen=True)
class TrainingJob:
    """One training."""

    number: int  # of the version
    out: Path
    parent: int | None
    begin: Path | None  # head to begin from; None: a new head
    kept: KeptTexts  # from which its texts are chosen


@dataclass(frozen=True)
class TrainingResult:
    """A finished training."""

    job: TrainingJob
    texts: TrainingTexts
    tau_before: float  # tokens per pass on the held-out texts
    tau_after: float
    train_seconds: float


class TrainingError(ForewordError):
    """A training has failed; the message is one line."""


@dataclass
class _Run:
    """A training that has not ended. The thread sets what it finds; the engine's thread reads it."""

    job: TrainingJob
    texts: TrainingTexts | None = None
    folder: Path | None = None  # the private directory of the texts
    process: TrainerProcess | None = None
    error: str | None = None  # why the training has failed
    taus: tuple[float, float] | None = None  # before and after the training, which has ended with success
    is_stopped: bool = False
    is_ending: bool = False  # the process has ended, and its result is read


@dataclass
class Trainings:
    """Trainings of an engine. All methods are called by the engine's thread."""

    settings: LearnSettings
    trainee: Trainee
    start: StartTrainer
    clock: Callable[[], float]  # seconds
    work: OrderedWork = field(default_factory=OrderedWork)
    ended: int = 0  # number of ended trainings
    failures: int = 0
    reason: str = ""  # why the last training failed; empty: it did not
    _run: _Run | None = None
    _pauses: Pauses | None = None  # of the running process
    _total: tuple[float, float] = (0.0, 0.0)  # run and busy seconds of ended trainings
    _again_at: float = -math.inf  # earliest time of the next training
    _pause: float = 0.0  # seconds after the newest failure

    def __post_init__(self) -> None:
        self._prefix = (
            f"foreword-learn-{sha256(str(self.settings.home.resolve()).encode()).hexdigest()[:16]}-"
        )
        for left in _memory().glob(f"{self._prefix}*"):  # of an engine that was killed
            shutil.rmtree(left, ignore_errors=True)

    @property
    def job(self) -> TrainingJob | None:
        """The training that has not ended."""
        return None if self._run is None else self._run.job

    @property
    def may_begin(self) -> bool:
        return self._run is None and self.clock() >= self._again_at

    @property
    def is_paused(self) -> bool:
        return self._pauses is not None and self._pauses.is_paused

    @property
    def seconds(self) -> tuple[float, float]:
        """Time in which a trainer ran, and the part of it in which requests were running."""
        run, busy = self._total
        if self._pauses is not None:
            run, busy = run + self._pauses.run_seconds, busy + self._pauses.busy_seconds
        return run, busy

    def begin(self, job: TrainingJob) -> None:
        """Write the texts of a training and start it, in the thread."""
        run = self._run = _Run(job)
        self.work.add(lambda: self._prepare(run))

    def _prepare(self, run: _Run) -> None:
        try:
            texts = run.texts = run.job.kept.for_training()
            if not texts.documents:
                raise TrainingError("no texts are left to train on")
            self._write(run, texts)
            if run.is_stopped:
                return
            job, trainee, settings = run.job, self.trainee, self.settings
            places = {"--model": trainee.model, "--data": run.folder, "--out": job.out}
            arguments = train_arguments(texts, job.begin, settings, {**places, "--device": trainee.device})
            _log.info("training version %d of the head on %d tokens", job.number, texts.tokens)
            run.process = self.start(arguments, job.out, settings.home / LOG, settings.nice)
        except Exception as error:  # whatever it is, the training has failed
            run.error = _one_line(error)

    def _write(self, run: _Run, texts: TrainingTexts) -> None:
        try:
            run.folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=_memory()))
            write_shard(run.folder, texts.documents, self.trainee.identity)
        except (OSError, ForewordError) as error:
            raise TrainingError(f"its texts cannot be written: {error}") from None

    def busy(self) -> None:
        if (pauses := self._running()) is not None:
            pauses.busy()

    def idle(self) -> None:
        if (pauses := self._running()) is not None:
            pauses.idle()

    def _running(self) -> Pauses | None:
        """Return the pauses of the process; None: none runs."""
        run = self._run
        if self._pauses is None and run is not None and run.process is not None and not run.is_ending:
            settings, is_shared = self.settings, self.trainee.is_shared
            self._pauses = Pauses(
                run.process,
                self.clock,
                settings.share,
                settings.resume_after,
                settings.slice_seconds,
                is_shared,
            )
        return self._pauses

    def check(self) -> TrainingResult | None:
        """Return the result of a training that has ended with success."""
        run = self._run
        if run is None:
            return None
        if run.process is not None and not run.is_ending and (code := run.process.poll()) is not None:
            run.is_ending = True
            self.work.add(lambda: self._read(run, code))
        if run.error is not None:
            self._fail(run.error)
            return None
        if run.taus is None or run.texts is None:
            return None
        before_run = self._total[0]
        self._end()
        self.ended, self.reason, self._pause = self.ended + 1, "", 0.0
        return TrainingResult(run.job, run.texts, *run.taus, self._total[0] - before_run)

    def _read(self, run: _Run, code: int) -> None:
        """Read the result of an ended process, and delete its texts and the states of the training."""
        try:
            if run.folder is not None:
                shutil.rmtree(run.folder, ignore_errors=True)
            if code:
                raise TrainingError(_why(code, self.settings.home / LOG))
            before, after = read_tau(run.job.out / TRAINING / "log.jsonl")
            if run.job.begin is None:
                before = 1.0  # plain decoding
            if before is None or after is None:
                raise TrainingError("no held-out text was measured: too few different prompts")
            keep_only_log(run.job.out)
            run.taus = before, after
        except Exception as error:  # whatever the files contain, the training has failed
            run.error = _one_line(error)

    def _fail(self, reason: str) -> None:
        """End the training with a failure."""
        self.stop()
        self.ended += 1
        self.postpone(reason)

    def postpone(self, reason: str) -> None:
        """Record a failure; the next training begins after a pause, which doubles with each failure."""
        _log.warning("the training of the head has failed: %s", reason)
        self.failures, self.reason = self.failures + 1, reason
        self._pause = min(max(2 * self._pause, self.settings.first_pause), self.settings.longest_pause)
        self._again_at = self.clock() + self._pause

    def stop(self) -> None:
        """Kill a running training and delete its files."""
        run = self._run
        self._end()
        if run is None:
            return
        run.is_stopped = True
        if run.process is not None:
            run.process.kill()
        self.work.add(
            lambda: _remove(run)
        )  # after `_prepare`, which may still write texts or start the process

    def _end(self) -> None:
        """Count the time of a training."""
        self._total, self._pauses, self._run = self.seconds, None, None

    def close(self) -> None:
        """Stop a running training, and finish all work of the thread."""
        self.stop()
        self.work.close()


def _remove(run: _Run) -> None:
    """End the process of a stopped training, and delete its files."""
    if run.process is not None:
        if run.process.poll() is None:
            run.process.kill()
        run.process.wait()
    for left in (run.folder, run.job.out):
        if left is not None:
            shutil.rmtree(left, ignore_errors=True)


def _memory() -> Path:
    """Return the directory for texts: in memory if possible."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def read_tau(log: Path) -> tuple[float | None, float | None]:
    """Return the tokens per pass on held-out texts before the first step and at the end; None: not measured."""
    before = after = None
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry.get("set") == HELD_OUT:
            after = float(entry["tau"])
            before = after if entry["step"] == 0 else before
    return before, after


def _one_line(error: Exception) -> str:
    """Return the message of an error; with its type if it was not expected, since it may be a bare name."""
    words = " ".join(str(error).split())
    return words if isinstance(error, ForewordError | OSError) else f"{type(error).__name__}: {words}"


def _why(code: int, log: Path) -> str:
    """Return why a process failed: its last line of output, or the signal that ended it."""
    if code < 0:
        return f"signal {-code} ended the training"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last: Sequence[str] = [line.strip() for line in lines if line.strip()][-1:]
    return last[0][:500] if last else f"it ended with exit code {code}"
