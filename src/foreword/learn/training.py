"""Runs trainings one at a time: writes their texts, starts the process, pauses it, and reads the result."""

import json
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from foreword.engine.background import BackgroundWork
from foreword.errors import ForewordError
from foreword.learn.pausing import Pauses
from foreword.learn.process import StartTrainer
from foreword.learn.settings import LearnSettings
from foreword.learn.texts import TrainingTexts
from foreword.models.heads.opening import open_head
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
    texts: TrainingTexts


@dataclass(frozen=True)
class TrainingResult:
    """A finished training."""

    job: TrainingJob
    tau_before: float  # tokens per pass on the held-out texts
    tau_after: float
    train_seconds: float


class TrainingError(ForewordError):
    """A training has failed; the message is one line."""


@dataclass
class Trainings:
    """Trainings of an engine. All methods are called by the engine's thread."""

    settings: LearnSettings
    trainee: Trainee
    start: StartTrainer
    clock: Callable[[], float]  # seconds
    background: BackgroundWork = field(default_factory=BackgroundWork)
    ended: int = 0  # number of ended trainings
    failures: int = 0
    reason: str = ""  # why the last training failed; empty: it did not
    job: TrainingJob | None = None
    _folder: Path | None = None  # the private directory of the texts
    _written: bool = False
    _error: str | None = None  # why the texts could not be written
    _pauses: Pauses | None = None  # of the running process
    _total: tuple[float, float] = (0.0, 0.0)  # run and busy seconds of ended trainings
    _again_at: float = -math.inf  # earliest time of the next training
    _pause: float = 0.0  # seconds after the next failure

    def __post_init__(self) -> None:
        self._prefix = (
            f"foreword-learn-{sha256(str(self.settings.home.resolve()).encode()).hexdigest()[:16]}-"
        )
        for left in _memory().glob(f"{self._prefix}*"):  # of an engine that was killed
            shutil.rmtree(left, ignore_errors=True)

    @property
    def may_begin(self) -> bool:
        return self.job is None and self.clock() >= self._again_at

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
        """Write the texts of a training in a thread; `check` starts the training when they are written."""
        self.job, self._written, self._error = job, False, None
        self.background.start(lambda: self._write(job), "foreword-learn")

    def _write(self, job: TrainingJob) -> None:
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=_memory()))
            write_shard(self._folder, job.texts.documents, self.trainee.identity)
        except (OSError, ForewordError) as error:
            self._error = f"its texts cannot be written: {error}"
        self._written = True

    def busy(self) -> None:
        if self._pauses is not None:
            self._pauses.busy()

    def idle(self) -> None:
        if self._pauses is not None:
            self._pauses.idle()

    def check(self) -> TrainingResult | None:
        """Start the training whose texts are written; return the result of one that has ended with success."""
        if self.job is None:
            return None
        try:
            if self._pauses is None:
                if self._written:
                    self._launch(self.job)
                return None
            code = self._pauses.process.poll()
            return None if code is None else self._finished(self.job, code)
        except (ForewordError, OSError) as error:
            self._fail(" ".join(str(error).split()))
            return None

    def _launch(self, job: TrainingJob) -> None:
        if self._error is not None or self._folder is None:
            raise TrainingError(self._error or "its texts were not written")
        settings = self.settings
        arguments = train_arguments(job, self.trainee, settings, self._folder)
        _log.info("training version %d of the head on %d tokens", job.number, job.texts.tokens)
        process = self.start(arguments, job.out, settings.home / LOG, settings.nice)
        self._pauses = Pauses(
            process,
            self.clock,
            settings.share,
            settings.resume_after,
            settings.slice_seconds,
            self.trainee.is_shared,
        )

    def _finished(self, job: TrainingJob, code: int) -> TrainingResult:
        """Return the result of an ended process; raise `TrainingError` if it has none."""
        if code:
            raise TrainingError(_why(code, self.settings.home / LOG))
        before, after = read_tau(job.out / TRAINING / "log.jsonl")
        if job.begin is None:
            before = 1.0  # plain decoding
        if before is None or after is None:
            raise TrainingError("no held-out text was measured: too few different prompts")
        before_run = self._total[0]
        self._end()
        self.ended, self.reason, self._pause = self.ended + 1, "", 0.0
        return TrainingResult(job, before, after, self._total[0] - before_run)

    def _fail(self, reason: str) -> None:
        """End the training; the next one begins after a pause, which doubles with each failure."""
        _log.warning("the training of the head has failed: %s", reason)
        self.stop()
        self.ended, self.failures, self.reason = self.ended + 1, self.failures + 1, reason
        self._pause = min(max(2 * self._pause, self.settings.first_pause), self.settings.longest_pause)
        self._again_at = self.clock() + self._pause

    def stop(self) -> None:
        """Kill a running training and delete its files."""
        job = self.job
        if self._pauses is not None:
            self._pauses.process.kill()
        self._end()
        if job is not None:
            shutil.rmtree(job.out, ignore_errors=True)

    def _end(self) -> None:
        """Count the time of a training and delete its texts."""
        self._total, self._pauses, self.job = self.seconds, None, None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close(self) -> None:
        self.background.close()
        self.stop()


def _memory() -> Path:
    """Return the directory for texts: in memory if possible."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def train_arguments(job: TrainingJob, trainee: Trainee, settings: LearnSettings, data: Path) -> list[str]:
    """Return the arguments of `foreword` for a training on the texts in a directory."""
    is_new = job.begin is None
    passes = settings.first_passes if is_new else settings.tune_passes
    longest = max(len(document.tokens) for document in job.texts.documents)
    least, most = settings.batch_tokens
    # A text of the maximum length fits into a batch a quarter larger, whatever its share of answer tokens is.
    fitting = int(1.25 * longest)
    batch = max(min(int(passes * job.texts.tokens / settings.wanted_steps), most), least, fitting)
    steps = max(math.ceil(passes * job.texts.tokens / batch), settings.min_steps)
    muon, adam = (settings.first_muon, settings.first_adam) if is_new else (settings.muon, settings.adam)
    given = {
        "--model": trainee.model,
        "--data": data,
        "--out": job.out,
        "--device": trainee.device,
        "--steps": steps,
        "--batch-tokens": batch,
        "--muon": muon,
        "--adam": adam,
        "--evaluate-every": 1e9,  # only before and after the training
    }
    words = [str(word) for pair in given.items() for word in pair]
    return ["train", "eagle3", *words, "--no-speed", *([] if job.begin is None else _shape(job.begin))]


def _shape(begin: Path) -> list[str]:
    """Return the options that make a head of the same shape as an existing one, and begin from it."""
    spec = open_head(begin).spec
    words = ["--begin", str(begin), "--intermediate", str(spec.layers[0].mlp.intermediate_size)]
    if spec.boundaries is not None:
        words += ["--taps", ",".join(map(str, spec.boundaries))]
    if spec.window is not None:
        words += ["--head-window", str(spec.window)]
    words += ["--drift-norms"] if spec.has("fc_norm.0.weight") else []
    return [*words, *([] if spec.has("lm_head.weight") else ["--no-own-output"])]


def read_tau(log: Path) -> tuple[float | None, float | None]:
    """Return the tokens per pass on held-out texts before the first step and at the end; None: not measured."""
    before = after = None
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry.get("set") == HELD_OUT:
            after = float(entry["tau"])
            before = after if entry["step"] == 0 else before
    return before, after


def _why(code: int, log: Path) -> str:
    """Return why a process failed: its last line of output, or the signal that ended it."""
    if code < 0:
        return f"signal {-code} ended the training"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last: Sequence[str] = [line.strip() for line in lines if line.strip()][-1:]
    return last[0][:500] if last else f"it ended with exit code {code}"
