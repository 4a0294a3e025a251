"""Runs a training: texts, trainer, reports, plots and files."""

import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch
import typer

from foreword.backends.choice import pick_device
from foreword.backends.support import is_plain
from foreword.bench.pictures import Chart, save_charts
from foreword.cli.console import fetched, note, say, stage_bar, stderr, stdout
from foreword.cli.options.grouped import pick
from foreword.cli.train.summary import show_summary
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.sources.resolve import resolve_model
from foreword.progress import StageProgress
from foreword.train import files
from foreword.train.heads.learner import Recipe
from foreword.train.loop.evaluate import TauReport
from foreword.train.loop.output import write_pieces
from foreword.train.loop.run import TrainRun, train
from foreword.train.loop.trainer import LearningRates, TrainSettings
from foreword.train.passes.decoder_target import DecoderTarget
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts import documents
from foreword.train.texts.batches import EndlessBatch, EngineBatch, TextBatch
from foreword.train.texts.data import WritingReport, WritingSettings, write_answers, write_training_set
from foreword.train.texts.prompts import FilePrompt, read_prompt_file

if TYPE_CHECKING:  # these import this module
    from foreword.cli.train.data import Data
    from foreword.cli.train.main import CommonOptions


def save_curves(log: Path, path: Path, title: str) -> None:
    """Plot the loss, and the tokens per pass of every evaluation set, from a training log."""
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    loss = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    tau: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        if "tau" in entry:
            tau.setdefault(entry["set"], []).append((entry["step"], entry["tau"]))
    charts = [
        Chart("steps", "loss of the first draft token", {"loss": loss}),
        Chart("steps", "tokens per pass", tau, level=(1.0, "plain decoding")),
    ]
    save_charts(charts, path, title)


STOPPED = 130  # exit code after Ctrl-C, by shell convention
_EVAL_TOKENS = 128  # per answer
_EVAL_CONTEXT = 2048
_HELD_OUT_TEXTS = 256
_GPU_ROWS, _ENGINE_ROWS, _CPU_ROWS = 2048, 256, 8  # texts written at once
_WRITING_MEMORY = 0.7  # `gpu_memory_utilization` of an engine that writes texts
_GPU_BATCH, _CPU_BATCH = 61440, 2048  # tokens per training step


class TrainingTarget:
    """A model on a device, for training and for writing texts."""

    def __init__(self, model: str, device: str, *, compiled: bool) -> None:
        self._device = pick_device(device)
        self.on_gpu = self._device.type == "cuda"
        self.compiled = compiled and self.on_gpu
        self._path = fetched(model)
        self.checkpoint = open_checkpoint(self._path)

    @cached_property
    def target(self) -> PlainTarget | DecoderTarget:
        if not is_plain(self.checkpoint.config):
            return DecoderTarget.load(self.checkpoint, self._device)
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        return PlainTarget.load(self.checkpoint, self._device, dtype, compiled=self.compiled)

    def batch(self, rows: int | None, context: int, seed: int) -> TextBatch:
        """Return a batch that writes texts: for Llama's layers on a GPU one with CUDA graphs, otherwise the engine."""
        if self.on_gpu and isinstance(self.target, PlainTarget):
            rows, stops = rows or _GPU_ROWS, self.checkpoint.tokenizer().eos_ids
            return EndlessBatch(self.target, rows=rows, context=context, stop_ids=stops, seed=seed)
        from foreword.engine.assembly import make_core
        from foreword.engine.config import EngineConfig
        from foreword.engine.loader import load_model

        if self.on_gpu and isinstance(self.target, DecoderTarget):
            loaded, rows = self.target.loaded, rows or _ENGINE_ROWS
            # The trainer needs the rest of the memory, before the engine's is free again.
            config = EngineConfig(max_num_seqs=rows, gpu_memory_utilization=_WRITING_MEMORY)
        else:
            loaded = load_model(str(self._path), device="cpu", generation_config="none")
            rows = rows or _CPU_ROWS
            config = EngineConfig(max_num_seqs=rows)
        core = make_core(loaded, config, "auto")
        # These texts are not a user's: their acceptance would mislead the next engine's prior.
        core.saved_estimates = None
        return EngineBatch(core, rows=rows, seed=seed)

    @cached_property
    def identity(self) -> str:
        """Identifies the model in texts and states."""
        return files.identity_of(self.checkpoint)

    @property
    def fingerprint(self) -> str:
        """Describes the model and its weights, so that another model's answers are not reused."""
        norm = self.target.weights.final_norm.float().sum().item()
        return f"{self.checkpoint.config} {norm:.6f} {self.target.dtype}"


class ConsoleWatcher:
    """Reports a training: a bar on a terminal, lines otherwise."""

    def __init__(self, show: StageProgress) -> None:
        self._show = show

    def say(self, line: str) -> None:
        (note if stderr.is_terminal else say)(line)  # on a terminal, above the bar

    def progress(self, share: float, line: str) -> None:
        """Show the finished fraction of the work; `line` names the stage."""
        self._show(line, int(1000 * min(share, 1.0)), 1000)


def run_training(
    options: "CommonOptions",
    recipe: Recipe,
    rates: LearningRates,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train, evaluate and write the result; `--minutes` counts from here. Then show the expected speed-up."""
    reports = _train_and_write(options, recipe, rates, clock)
    show_summary(options, recipe.method, reports)  # by now the training's memory is free


def _train_and_write(
    options: "CommonOptions", recipe: Recipe, rates: LearningRates, clock: Callable[[], float]
) -> dict[str, TauReport]:
    began = clock()
    files.require_run_directory(options.out, resume=options.resume)
    if options.begin is not None:
        files.require_same_kind(options.begin, recipe.method)
    if options.export is not None:
        files.require_export_directory(options.export, options.out)
    evaluation = read_prompts(options.evaluate)
    model = TrainingTarget(options.model, options.device, compiled=options.compiled)
    recipe.check(model.checkpoint.config)
    data = options.data or options.out / files.TEXTS
    documents.require_written_by(data, model.identity)

    def answer(prompts: Sequence[FilePrompt]) -> list[documents.Document]:
        rows = min(512 if model.on_gpu else _CPU_ROWS, len(prompts))
        batch = model.batch(rows, _EVAL_CONTEXT, seed=0)
        return write_answers(
            batch, model.checkpoint.tokenizer(), prompts, max_new=_EVAL_TOKENS, context=_EVAL_CONTEXT
        )

    hint = "give fewer --batch-tokens"
    with stop_signals() as stopped, memory_in_one_line(hint), stage_bar() as show:
        watcher = ConsoleWatcher(show)
        if options.data is None:
            spent = clock() - began
            _write_first(options, model, data, watcher, stopped, spent)
        if stopped():
            say("stopped before training; the same command continues with the existing texts")
            raise typer.Exit(STOPPED)
        rates = replace(
            rates,
            muon=rates.muon if options.muon is None else options.muon,
            adam=rates.adam if options.adam is None else options.adam,
        )
        kept_bytes = int(options.keep_states * 2**30)
        settings = pick(TrainSettings, options, rates=rates, compiled=model.compiled, kept_bytes=kept_bytes)
        run = pick(
            TrainRun,
            options,
            recipe=recipe,
            model=model.identity,
            batch_rows=options.batch_tokens or (_GPU_BATCH if model.on_gpu else _CPU_BATCH),
            tail_multiple=4096 if model.on_gpu else 64,
            seconds=None if options.minutes is None else 60 * options.minutes,
            began=began,
            clock=clock,
            report_every=50 if model.on_gpu else 10,
            settings=settings,
            command=shlex.join(["foreword", *sys.argv[1:]]),
            stop=stopped,
        )
        texts = documents.gather_texts(data, evaluation, answer, _HELD_OUT_TEXTS, model.fingerprint)
        reports = train(model.checkpoint, model.target, run, texts, watcher)
    if reports is None:
        say(f"stopped; its state is in {run.state.parent}, and --resume continues from it")
        raise typer.Exit(STOPPED)
    if options.export is not None:
        write_pieces(options.out, options.export, bits=options.export_bits, model=model.identity)
    if options.plot is not None:
        save_curves(run.log, options.plot, f"{recipe.method} for {options.model}")
    say(f"{options.out}: {recipe.method}, with a card in README.md")
    return reports


def run_writing(options: "Data") -> None:
    """Write training texts until the time or the tokens are used up."""
    files.require_directory(options.out)
    prompts = read_prompts(options.prompts)
    model = TrainingTarget(options.model, options.device, compiled=options.compiled)
    documents.require_written_by(options.out, model.identity)
    with stop_signals() as stopped, memory_in_one_line("give fewer --rows"), stage_bar() as bar:
        settings = WritingSettings(
            context=options.context,
            seconds=None if options.minutes is None else 60 * options.minutes,
            answer_tokens=options.tokens,
            only_prompts=options.only_prompts,
            seed=documents.count_shards(options.out) if options.seed is None else options.seed,
            stop=stopped,
        )
        write_texts(model, options.out, settings, prompts, options.rows, ConsoleWatcher(bar))
    if stopped():
        raise typer.Exit(STOPPED)


def show_texts(directory: Path, model: str, count: int) -> None:
    """Print the first training texts of a directory."""
    if not documents.count_shards(directory):
        raise RequestError(f"{directory} has no training texts; write some with --minutes or --tokens")
    checkpoint = open_checkpoint(resolve_model(model))
    documents.require_written_by(directory, files.identity_of(checkpoint))
    tokenizer = checkpoint.tokenizer()
    for document in islice(documents.read_shards(directory), count):
        begin = document.answer_begin
        prompt = tokenizer.decode(document.tokens[:begin].tolist(), skip_special_tokens=False)
        answer = tokenizer.decode(document.tokens[begin:].tolist(), skip_special_tokens=False)
        where = ", held out" if document.held_out else ""
        stdout.rule(f"{document.kind}, temperature {document.temperature:.2f}{where}")
        stdout.print(prompt, style="dim", markup=False, end="")
        stdout.print(answer, markup=False)


def _write_first(
    options: "CommonOptions",
    model: TrainingTarget,
    data: Path,
    watcher: ConsoleWatcher,
    stopped: Callable[[], bool],
    spent: float,
) -> None:
    """Write training texts unless some exist: for a third of the remaining time, or one epoch of the steps."""
    if documents.count_shards(data):
        return
    seconds = None if options.minutes is None else max((60 * options.minutes - spent) / 3, 0.0)
    size = options.batch_tokens or (_GPU_BATCH if model.on_gpu else _CPU_BATCH)
    tokens = None if options.steps is None else max(options.steps * size // 4, 4096)
    settings = WritingSettings(seconds=seconds, answer_tokens=tokens, seed=options.seed, stop=stopped)
    write_texts(model, data, settings, read_prompts(options.prompts), None, watcher)


def write_texts(
    model: TrainingTarget,
    out: Path,
    settings: WritingSettings,
    prompts: Sequence[FilePrompt],
    rows: int | None,
    watcher: ConsoleWatcher,
) -> None:
    """Write training texts with the model, and report how many; the context is limited by the model's."""
    context = min(settings.context, model.checkpoint.config.context_length)
    settings = replace(settings, context=context, model=model.identity)

    def on_progress(report: WritingReport) -> None:
        shares = [0.0]  # finished fractions by the limits of time and tokens
        if settings.seconds is not None:
            shares.append(report.seconds / settings.seconds)
        if settings.answer_tokens is not None:
            shares.append(report.answer_tokens / settings.answer_tokens)
        watcher.progress(max(shares), f"writing: {report.answer_tokens / 1e3:,.0f}k answer tokens")

    tokenizer = model.checkpoint.tokenizer()
    batch = model.batch(rows, settings.context, settings.seed)
    report = write_training_set(batch, tokenizer, out, settings, prompts=prompts, on_progress=on_progress)
    seconds = max(report.seconds, 1e-9)
    watcher.say(
        f"{report.documents} texts, {_counted(report.tokens)} tokens, {_counted(report.answer_tokens)} in answers "
        f"in {report.seconds:.0f} s: {_counted(report.answer_tokens / seconds)} answer tokens/s, "
        f"{_counted(report.written_tokens / seconds)} drawn/s"
    )
    watcher.say(", ".join(f"{kind} {_counted(count)}" for kind, count in report.kinds.most_common()))


def _counted(number: float) -> str:
    return f"{number / 1e6:.2f}M" if number >= 1e6 else f"{number:,.0f}"


def read_prompts(paths: Sequence[Path] | None) -> list[FilePrompt]:
    return [prompt for path in paths or [] for prompt in read_prompt_file(path)]


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM has arrived within the block.

    A second signal raises `KeyboardInterrupt`.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def memory_in_one_line(hint: str) -> Iterator[None]:
    """Turn a GPU's out-of-memory error into a `RequestError` of one line that ends with the hint."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
        raise RequestError(f"{reason}: the device's memory is full; {hint}") from None
