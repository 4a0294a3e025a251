"""Runs a training, and writes training states, evaluations and the result to its directory."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from foreword.errors import RequestError
from foreword.models.formats.checkpoint import Checkpoint
from foreword.train.files import (
    TRAINING,
    WEIGHTS,
    require_run_directory,
    require_space,
    state_in,
    write_state,
)
from foreword.train.heads.learner import (
    HeadVocabulary,
    Recipe,
    choose_vocabulary,
    full_vocabulary,
    stored_vocabulary,
)
from foreword.train.loop.evaluate import TauReport
from foreword.train.loop.output import read_weights, write_card, write_output
from foreword.train.loop.trainer import Trainer, TrainPhase, TrainProgress, TrainSettings
from foreword.train.passes.packing import BatchSize, fitting_size, require_fitting
from foreword.train.passes.target import FrozenTarget
from foreword.train.texts.documents import RunTexts

_SAVE_SECONDS = 50.0  # minimum time between two saved training states
FIRST_EVALUATION = 0.25  # fraction of a time-limited run after which it is first evaluated


class Watcher(Protocol):
    """Displays progress."""

    def say(self, line: str) -> None:
        """Print a line."""

    def progress(self, share: float, line: str) -> None:
        """Show the completed fraction and the current state."""


@dataclass(frozen=True)
class TrainRun:
    """Settings of a training run."""

    out: Path
    recipe: Recipe
    model: str | None = None  # the target's identity, which a resumed state must have
    batch_rows: int = 61440  # tokens of a batch
    tail_multiple: int = 4096  # the number of tail rows of a batch is a multiple of this
    seconds: float | None = None  # of the whole run, including the last evaluation
    began: float | None = None  # start of the time limit on `clock`; None: the first step
    steps: int | None = None  # further steps of this run; None: no limit
    final: bool = False  # end with a decay of the learning rate
    decay_share: float = 0.4  # fraction of the run with a decaying learning rate
    resume: bool = False  # continue from the saved training state
    begin: Path | None = None  # directory with the initial weights, written by another run
    evaluate_every: float = 90.0  # seconds
    report_every: int = 50  # steps
    settings: TrainSettings = field(default_factory=TrainSettings)
    command: str = ""  # shown on the model card
    stop: Callable[[], bool] = lambda: False  # returns whether to end early
    clock: Callable[[], float] = time.monotonic

    @property
    def state(self) -> Path:
        return state_in(self.out)

    @property
    def log(self) -> Path:
        return self.out / TRAINING / "log.jsonl"


def train(
    checkpoint: Checkpoint, target: FrozenTarget, run: TrainRun, texts: RunTexts, watcher: Watcher
) -> dict[str, TauReport] | None:
    """Train and write the result to `run.out`; return the last evaluations by set of texts.

    Return None if stopped early. The directory then has a training state to resume from.
    """
    trainer = _trainer(target, texts, run, watcher)
    session = _Session(trainer, run, texts, watcher)
    session.train()
    save_training(run.state, trainer, run.recipe, run.model)
    if run.stop():
        return None
    amount = f"{trainer.step:,} steps of {trainer.size.rows:,} tokens"
    watcher.say(amount)
    reports = session.measure()
    files = trainer.learner.files(checkpoint, min(3, run.settings.depth))
    if reports:  # the first set of texts gives the published acceptance, which engines use as a prior
        rates = [round(rate, 3) for rate in next(iter(reports.values())).by_level]
        files = replace(files, config={**files.config, "acceptance_by_level": rates})
    sha256 = write_output(run.out, files)
    write_card(
        run.out,
        run.recipe.method,
        target=checkpoint.path.name,
        sha256=sha256,
        data=texts.summary(),
        training=f"{amount}.",
        command=run.command,
        measured=reports,
    )
    return reports


class _Session:
    """Runs one training phase; evaluates, saves and reports between its steps."""

    def __init__(self, trainer: Trainer, run: TrainRun, texts: RunTexts, watcher: Watcher) -> None:
        self._trainer, self._run, self._texts, self._watcher = trainer, run, texts, watcher
        first = trainer.step
        self._seconds = _seconds_left(run)
        self._phase = TrainPhase(
            seconds=self._seconds,
            last_step=None if run.steps is None else first + run.steps,
            final=run.final,
            decay_share=run.decay_share,
            clock=run.clock,
            first_step=first,
            stop=run.stop,
        )
        self._saved_at = self._measured_at = run.clock()
        self._evaluation_seconds: float | None = None  # of the longest evaluation; None: none yet
        self._decaying = False
        self._loss_text = self._tau = ""  # newest loss and tokens per pass, for the progress line

    def train(self) -> None:
        if self._run.begin is not None and self._trainer.step == 0:
            self.measure()  # of the weights that the run begins with, for comparison
            self._measured_at = self._run.clock()
        self._trainer.train(self._phase, self._run.report_every, self._on_report, self._on_step)

    def _is_due(self, step: int, now: float) -> bool:
        """Return whether to evaluate now. With a time limit the first evaluation is early, to measure its duration."""
        is_unknown = self._seconds is not None and self._evaluation_seconds is None
        is_early = is_unknown and self._phase.done(step) > FIRST_EVALUATION
        return is_early or now - self._measured_at > self._run.evaluate_every

    def measure(self) -> dict[str, TauReport]:
        """Evaluate all sets of texts; log and return the results. Reserve the same time for the last evaluation."""
        began, reports = self._run.clock(), {}
        for name, documents in self._texts.measured.items():
            report = reports[name] = self._trainer.evaluate(documents)
            kinds = ", ".join(f"{kind} {tau:.2f}" for kind, tau in report.by_kind().items())
            self._tau = f", τ {report.tau():.2f}"
            self._watcher.say(
                f"  τ at {report.depth} draft tokens, {name}: {report.tau():.3f} "
                f"(first draft token {report.first_hit:.3f}; {kinds})"
            )
            entry = {"step": self._trainer.step, "set": name, "tau": report.tau(), "kinds": report.by_kind()}
            self._log(entry)
        self._evaluation_seconds = max(self._run.clock() - began, self._evaluation_seconds or 0.0)
        if self._seconds is not None:
            self._phase.seconds = max(self._seconds - self._evaluation_seconds, 0.0)
        return reports

    def _on_report(self, progress: TrainProgress) -> None:
        self._loss_text = f", loss {progress.loss:.3f}"
        self._watcher.say(_progress_line(progress, self._trainer.target.device))
        self._log(asdict(progress))

    def _on_step(self, step: int) -> None:
        run, now = self._run, self._run.clock()
        self._watcher.progress(self._phase.done(step), f"step {step}{self._loss_text}{self._tau}")
        if not self._decaying and self._phase.rate(step) < 1.0:
            self._decaying = True
            # A later run can continue training from this state, whose learning rate has not decayed.
            save_training(run.state.with_name("before_decay.pt"), self._trainer, run.recipe, run.model)
        if now - self._saved_at > _SAVE_SECONDS:
            save_training(run.state, self._trainer, run.recipe, run.model)
            self._saved_at = run.clock()
        if self._is_due(step, now):
            self.measure()
            self._measured_at = run.clock()

    def _log(self, entry: dict[str, object]) -> None:
        self._run.log.parent.mkdir(parents=True, exist_ok=True)
        with self._run.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _seconds_left(run: TrainRun) -> float | None:
    """Return the seconds until the time limit; None: no limit."""
    if run.seconds is None or run.began is None:
        return run.seconds
    left = run.began + run.seconds - run.clock()
    if left <= 0:
        raise RequestError(
            f"{run.seconds - left:.0f} s passed before the first step, but the run is limited to {run.seconds:.0f} s; "
            "give more --minutes, or --steps instead"
        )
    return left


def _trainer(target: FrozenTarget, texts: RunTexts, run: TrainRun, watcher: Watcher) -> Trainer:
    """Check the directory and the texts; return a new trainer, or a trainer restored from the saved state."""
    require_run_directory(run.out, resume=run.resume)
    saved = SavedTraining(run.state, target.device) if run.resume else None
    documents, vocab_size = texts.trained, target.config.vocab_size
    texts.check_tokens(vocab_size)
    initial = None if run.begin is None or saved is not None else read_weights(run.begin / WEIGHTS)
    size = fitting_size(documents, run.batch_rows, run.tail_multiple) if saved is None else saved.size
    require_fitting(documents, size)
    if saved is not None:
        saved.check(run.recipe, run.model)
        vocabulary = saved.vocabulary(vocab_size)
    elif initial is not None:
        vocabulary = stored_vocabulary(initial, vocab_size)
    elif (wanted := run.recipe.draft_vocab) is not None:
        vocabulary = choose_vocabulary(documents, wanted, vocab_size)
    else:
        vocabulary = full_vocabulary(vocab_size)
    learner = run.recipe.build(target, vocabulary, compiled=run.settings.compiled)
    # A training state has the weights and up to two moments of each. There may be three, one while it is written.
    weight_bytes = 4 * sum(parameter.numel() for parameter in learner.parameters())
    require_space(run.out, 3 * 3 * weight_bytes + weight_bytes, "states of this training")
    trainer = Trainer(learner, documents, size, run.settings)
    tokens = sum(len(document.tokens) for document in documents)
    count = f"{tokens / 1e6:.1f}M" if tokens >= 10**6 else f"{tokens:,}"
    watcher.say(
        f"{len(documents):,} texts, {count} tokens; vocabulary {len(vocabulary.token_ids)} covers "
        f"{vocabulary.coverage:.2%} of answers; {size.rows} rows a step, {size.tails} of them in answers; "
        f"{sum(p.numel() for p in learner.parameters() if p.requires_grad) / 1e6:.1f}M parameters"
    )
    if saved is not None:
        trainer.load(saved.state)
        watcher.say(f"resumed at step {trainer.step}")
    else:
        learner.begin(documents, run.settings.seed)
        if initial is not None:
            learner.load_tensors(initial)
    return trainer


def _progress_line(progress: TrainProgress, device: torch.device) -> str:
    hits = " ".join(f"{hit:.3f}" for hit in progress.hits)
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB" if device.type == "cuda" else ""
    return (
        f"step {progress.step}: loss {progress.loss:.3f}, right {hits}, gradient {progress.gradient:.2f}, "
        f"{progress.steps_per_second:.2f} steps/s, {progress.rows_per_second / 1e3:.0f}k tokens/s, "
        f"rate {progress.rate:.2f}{memory}"
    )


_RENAMED = {"guesses": "draft_tokens"}
"""Current names of the recipe keys that version 0.1 saved under another name."""


def save_training(path: Path, trainer: Trainer, recipe: Recipe, model: str | None) -> None:
    """Save everything that an exact resumption needs; `model` is the target's identity."""
    vocabulary = trainer.learner.vocabulary
    description = {
        "method": recipe.method,
        "recipe": asdict(recipe),  # type: ignore[call-overload] # recipes are dataclasses
        "vocabulary": vocabulary.token_ids,
        "coverage": vocabulary.coverage,
        "model": model,
        "size": [trainer.size.rows, trainer.size.tails],
    }
    write_state(path, description | trainer.state())


class SavedTraining:
    """A loaded training state."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Load tensors and plain values; nothing in the file is executed."""
        self._path = path
        try:
            self.state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        except FileNotFoundError:
            raise RequestError(f"there is no training state {path} to resume") from None
        except Exception as error:  # torch raises various exceptions for damaged files
            raise RequestError(
                f"{path} is not a training state ({type(error).__name__}); remove it and start anew"
            ) from None

    def check(self, recipe: Recipe, model: str | None) -> None:
        """Raise `RequestError` if this run trains for another target or another shape."""
        if None not in (model, self.state.get("model")) and model != self.state["model"]:
            raise RequestError(
                f"{self._path} was trained for another model; resume with that one or choose another --out"
            )
        expected = {"method": recipe.method, **asdict(recipe)}  # type: ignore[call-overload]
        # States of earlier versions lack newer fields, which then had their defaults.
        saved = {**asdict(type(recipe)()), "method": self.state["method"]}  # type: ignore[call-overload]
        saved |= {_RENAMED.get(key, key): value for key, value in self.state["recipe"].items()}
        for key, value in expected.items():
            if saved.get(key) != value:
                raise RequestError(
                    f"{self._path} was trained with {key} {saved.get(key)}, not {value}; "
                    "resume with the same options or choose another --out"
                )

    def vocabulary(self, vocab_size: int) -> HeadVocabulary:
        return HeadVocabulary.of(self.state["vocabulary"].cpu(), vocab_size, self.state["coverage"])

    @property
    def size(self) -> BatchSize:
        return BatchSize(*self.state["size"])
