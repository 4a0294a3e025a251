"""Writes a training set of texts by the target itself in shards, up to a time or size limit."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foreword.errors import RequestError
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.train.files import require_space
from foreword.train.texts.batches import Job, TextBatch
from foreword.train.texts.documents import Document, make_document, write_shard
from foreword.train.texts.prompts import FilePrompt
from foreword.train.texts.writing import Writer, WritingLimits

_SHARD_TOKENS = 2_000_000
# Maximum time between two shards: an interruption loses the texts written since the last.
_SHARD_SECONDS = 50.0
_DISK_BYTES = 64_000_000  # about four shards


@dataclass(frozen=True)
class WritingSettings:
    """Limits and settings for writing a training set."""

    context: int = 1280  # maximum tokens of a conversation
    seconds: float | None = None  # time limit; None: none
    answer_tokens: int | None = None  # number of answer tokens to write; None: no limit
    only_prompts: bool = False  # answer only the given prompts, and generate no others
    seed: int = 0
    model: str | None = None  # identity of the writing model
    stop: Callable[[], bool] = lambda: False  # returns whether to end early
    clock: Callable[[], float] = time.monotonic


@dataclass
class WritingReport:
    """Counts of what has been written so far."""

    documents: int = 0
    tokens: int = 0  # of prompts and answers
    answer_tokens: int = 0
    seconds: float = 0.0  # since the end of the first pass
    written_tokens: int = 0  # all generated tokens, including those of generated prompts
    kinds: Counter[str] = field(default_factory=Counter)  # answer tokens by kind of text


class _Shards:
    """Collects documents, writes them to shards, and counts them."""

    def __init__(self, directory: Path, settings: WritingSettings) -> None:
        self._directory = directory
        self._model = settings.model
        self._clock = settings.clock
        self._pending: list[Document] = []  # not written yet
        self._tokens = 0  # tokens of pending documents
        self._flushed_at = self._clock()
        self.report = WritingReport()

    def add(self, document: Document) -> None:
        self._pending.append(document)
        self._tokens += len(document.tokens)
        answers = int(document.is_answer.sum())
        self.report.documents += 1
        self.report.tokens += len(document.tokens)
        self.report.answer_tokens += answers
        self.report.kinds[document.kind] += answers

    def flush_if_due(self) -> None:
        """Write a shard if it is full or the last one was written long ago."""
        if self._tokens >= _SHARD_TOKENS or self._clock() - self._flushed_at > _SHARD_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            write_shard(self._directory, self._pending, self._model)
        self._pending.clear()
        self._tokens = 0
        self._flushed_at = self._clock()


def write_training_set(
    batch: TextBatch,
    tokenizer: Tokenizer,
    directory: Path,
    settings: WritingSettings,
    *,
    prompts: Sequence[FilePrompt] = (),
    on_progress: Callable[[WritingReport], None] | None = None,
) -> WritingReport:
    """Write shards to a directory until a limit of `settings` is reached; return the counts."""
    require_space(directory, _DISK_BYTES, "training texts")
    shards = _Shards(directory, settings)
    report = shards.report
    writer = Writer(
        tokenizer,
        WritingLimits(settings.context),
        shards.add,
        prompts=prompts,
        only_prompts=settings.only_prompts,
        seed=settings.seed,
    )
    begin = None  # time of the first pass's end
    for _ in batch.run(writer):
        begin = settings.clock() if begin is None else begin
        report.seconds = settings.clock() - begin
        report.written_tokens = batch.tokens_written
        if on_progress is not None:
            on_progress(report)
        shards.flush_if_due()
        if settings.stop() or _is_enough(report, settings):
            break
    shards.flush()
    return report


def write_answers(
    batch: TextBatch, tokenizer: Tokenizer, prompts: Sequence[FilePrompt], *, max_new: int, context: int
) -> list[Document]:
    """Return greedy answers to the first turns of the prompts; prompts that are too long are left out."""
    documents: list[tuple[int, Document]] = []

    def job(number: int, kind: str, prompt: list[int]) -> Job:
        def done(written: list[int]) -> None:
            answers = [(len(prompt), len(prompt) + len(written))]
            documents.append((number, make_document([*prompt, *written], answers, kind, 0.0)))

        return Job(prompt, max_new, 0.0, done)

    encoded = [tokenizer.encode_chat(prompt.messages()) for prompt in prompts]
    jobs = [
        job(number, prompt.kind, ids)
        for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True))
        if len(ids) + max_new <= context
    ]
    for _ in batch.run(iter(jobs)):
        pass
    if not documents:
        raise RequestError(f"no evaluation prompt fits into {context} tokens; give shorter ones")
    return [document for _, document in sorted(documents, key=lambda pair: pair[0])]


def _is_enough(report: WritingReport, settings: WritingSettings) -> bool:
    if settings.seconds is not None and report.seconds >= settings.seconds:
        return True
    return settings.answer_tokens is not None and report.answer_tokens >= settings.answer_tokens
