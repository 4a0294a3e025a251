"""A whole training run of an EAGLE-3 head in one directory: texts, states, measurements, the head itself."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from foreword.errors import RequestError
from foreword.models.formats.checkpoint import Checkpoint
from foreword.train.checkpoints import load_state
from foreword.train.data import write_answers
from foreword.train.documents import Document, read_shards
from foreword.train.eagle3 import Eagle3Head, shape_for
from foreword.train.evaluate import TauReport
from foreword.train.export import write_head
from foreword.train.packing import BatchSize, exact_size, fitting_size, pack
from foreword.train.prompts import FilePrompt
from foreword.train.schedule import Stretch
from foreword.train.target import Target
from foreword.train.trainer import Trainer, TrainProgress, TrainSettings
from foreword.train.vocabulary import DraftVocabulary, choose_vocabulary

Say = Callable[[str], None]

_SAVE_SECONDS = 50.0
_EVAL_TOKENS = 128
_SAMPLE = 64  # texts from which the sizes of the taps are measured


@dataclass(frozen=True)
class Eagle3Run:
    """What to train, and how long."""

    out: Path
    data: Path
    draft_vocabulary: int = 16384
    taps: tuple[int, ...] | None = None
    intermediate: int | None = None
    batch_rows: int = 61440
    tail_multiple: int = 4096
    seconds: float | None = None
    steps: int | None = None
    final: bool = False  # end with a decay
    decay_share: float = 0.4
    resume: bool = False
    evaluate_every: float = 90.0  # seconds
    held_out_texts: int = 256
    settings: TrainSettings = field(default_factory=TrainSettings)

    @property
    def state(self) -> Path:
        return self.out / "training" / "state.pt"


def train_eagle3(
    checkpoint: Checkpoint,
    target: Target,
    run: Eagle3Run,
    evaluation: Sequence[FilePrompt],
    say: Say,
) -> dict[str, TauReport]:
    """Train and leave the head in `run.out`; the last measurements by set of prompts."""
    documents = list(read_shards(run.data))
    trained_on = [document for document in documents if not document.held_out]
    if not trained_on:
        raise RequestError(
            f"there are no training texts in {run.data}; write some with `foreword train data`"
        )
    held_out = [document for document in documents if document.held_out and document.temperature == 0]
    sets = {"held out": held_out[: run.held_out_texts]}
    if evaluation:
        prompts = [(prompt.kind, prompt.text) for prompt in evaluation]
        sets["files"] = write_answers(target, checkpoint.tokenizer(), prompts, max_new=_EVAL_TOKENS)
    trainer = _trainer(target, trained_on, run, say)
    first = trainer.step
    stretch = Stretch(
        seconds=run.seconds,
        last_step=None if run.steps is None else first + run.steps,
        final=run.final,
        decay_share=run.decay_share,
        first_step=first,
    )
    log = run.state.with_name("log.jsonl")
    saved_at = measured_at = time.monotonic()
    decaying = False

    def measure() -> dict[str, TauReport]:
        reports = {}
        for name, texts in sets.items():
            if not texts:
                continue
            report = reports[name] = trainer.evaluate(texts)
            kinds = ", ".join(f"{kind} {tau:.2f}" for kind, tau in report.by_kind().items())
            say(
                f"  τ at {report.depth} guesses, {name}: {report.tau():.3f} "
                f"(first guess {report.first_guess:.3f}; {kinds})"
            )
            _log(log, {"step": trainer.step, "set": name, "tau": report.tau(), **report.by_kind()})
        return reports

    def on_report(progress: TrainProgress) -> None:
        say(_line(progress, target))
        _log(log, asdict(progress))

    def on_step(step: int) -> None:
        nonlocal saved_at, measured_at, decaying
        now = time.monotonic()
        if not decaying and stretch.rate(step) < 1.0:
            decaying = True  # a later stretch can go on from here
            trainer.save(run.state.with_name("before_decay.pt"))
        if now - saved_at > _SAVE_SECONDS:
            trainer.save(run.state)
            saved_at = time.monotonic()
        if now - measured_at > run.evaluate_every:
            measure()
            measured_at = time.monotonic()

    trainer.train(stretch, on_report=on_report, on_step=on_step)
    trainer.save(run.state)
    reports = measure()
    write_head(
        run.out,
        trainer.head,
        trainer.vocabulary,
        target.config,
        verifier=checkpoint.path.name,
        speculative_tokens=min(3, run.settings.depth),
    )
    return reports


def _trainer(target: Target, documents: Sequence[Document], run: Eagle3Run, say: Say) -> Trainer:
    if run.resume and run.state.exists():
        state = load_state(run.state, torch.device("cpu"))
        vocabulary = DraftVocabulary.of(state["vocabulary"], target.config.vocab_size, state["coverage"])
        size = BatchSize(*state["size"])
    else:
        vocabulary = choose_vocabulary(documents, run.draft_vocabulary, target.config.vocab_size)
        size = fitting_size(documents, run.batch_rows, run.tail_multiple)
    head = Eagle3Head(shape_for(target, len(vocabulary.token_ids), run.taps, run.intermediate))
    head = head.to(target.device)
    trainer = Trainer(target, head, vocabulary, documents, size, run.settings)
    tokens = sum(len(document.tokens) for document in documents)
    say(
        f"{len(documents)} texts, {tokens / 1e6:.1f}M tokens; vocabulary {len(vocabulary.token_ids)} covers "
        f"{vocabulary.coverage:.2%} of answers; {size.rows} rows a step, {size.tails} of them in answers; "
        f"{sum(p.numel() for p in head.parameters()) / 1e6:.1f}M parameters"
    )
    if run.resume and run.state.exists():
        trainer.load(run.state)
        say(f"resumed at step {trainer.step}")
        return trainer
    head.begin_from(target, vocabulary.token_ids, run.settings.seed)
    sample = documents[:_SAMPLE]
    batch = pack(sample, exact_size(sample), target.device)
    head.scale_taps(target.forward(batch.token_ids, batch.positions, batch.texts, head.shape.taps))
    return trainer


def _line(progress: TrainProgress, target: Target) -> str:
    hits = " ".join(f"{hit:.3f}" for hit in progress.hits)
    memory = ""
    if target.device.type == "cuda":
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB"
    return (
        f"step {progress.step}: loss {progress.loss:.3f}, right {hits}, gradient {progress.gradient:.2f}, "
        f"{progress.steps_per_second:.2f} steps/s, {progress.rows_per_second / 1e3:.0f}k tokens/s, "
        f"{progress.teraflops:.1f} TFLOP/s, rate {progress.rate:.2f}{memory}"
    )


def _log(path: Path, entry: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
