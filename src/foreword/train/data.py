"""Writing a training set: the target's own texts, into shards, until time or size is up."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.train.documents import Document, make_document, write_shard
from foreword.train.endless import EndlessBatch, Job
from foreword.train.target import Target
from foreword.train.writing import Writer, WritingLimits

_SHARD_TOKENS = 2_000_000


@dataclass(frozen=True)
class WritingSettings:
    """How a training set is written."""

    rows: int = 2048  # texts at a time
    context: int = 1280  # longest prompt and answer together
    seconds: float | None = None
    answer_tokens: int | None = None
    seed: int = 0


@dataclass
class WritingReport:
    """What was written so far."""

    documents: int = 0
    tokens: int = 0  # of documents, prompts included
    answer_tokens: int = 0
    seconds: float = 0.0  # since the first stretch had ended
    written_tokens: int = 0  # everything that was drawn, prompts that the target wrote included
    kinds: Counter[str] = field(default_factory=Counter)  # answer tokens by kind


def write_training_set(
    target: Target,
    tokenizer: Tokenizer,
    directory: Path,
    settings: WritingSettings,
    *,
    prompts: Sequence[str] = (),
    on_progress: Callable[[WritingReport], None] | None = None,
) -> WritingReport:
    """Add shards to a directory; what is in it stays."""
    report = WritingReport()
    pending: list[Document] = []
    pending_tokens = 0

    def emit(document: Document) -> None:
        nonlocal pending_tokens
        pending.append(document)
        answers = int(document.is_answer.sum())
        pending_tokens += len(document.tokens)
        report.documents += 1
        report.tokens += len(document.tokens)
        report.answer_tokens += answers
        report.kinds[document.kind] += answers

    def flush() -> None:
        nonlocal pending_tokens
        if pending:
            write_shard(directory, pending)
        pending.clear()
        pending_tokens = 0

    writer = Writer(tokenizer, WritingLimits(settings.context), emit, prompts=prompts, seed=settings.seed)
    batch = _batch(target, tokenizer, settings)
    begin = None
    for _ in batch.run(writer):
        begin = begin or time.monotonic()
        report.seconds = time.monotonic() - begin
        report.written_tokens = batch.tokens_written
        if on_progress is not None:
            on_progress(report)
        if pending_tokens >= _SHARD_TOKENS:
            flush()
        if _is_enough(report, settings):
            break
    flush()
    return report


def write_answers(
    target: Target,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[str, str]],
    *,
    max_new: int,
    rows: int = 512,
    context: int = 2048,
) -> list[Document]:
    """Greedy answers to (kind, text) prompts, for measuring; one that is too long is left out."""
    documents: list[tuple[int, Document]] = []

    def job(number: int, kind: str, prompt: list[int]) -> Job:
        def done(written: list[int]) -> None:
            answers = [(len(prompt), len(prompt) + len(written))]
            documents.append((number, make_document([*prompt, *written], answers, kind, 0.0)))

        return Job(prompt, max_new, 0.0, done)

    encoded = [tokenizer.encode_chat([{"role": "user", "content": text}]) for _, text in prompts]
    jobs = [
        job(number, kind, ids)
        for number, ((kind, _), ids) in enumerate(zip(prompts, encoded, strict=True))
        if len(ids) + max_new <= context
    ]
    settings = WritingSettings(rows=min(rows, max(len(jobs), 1)), context=context)
    for _ in _batch(target, tokenizer, settings).run(iter(jobs)):
        pass
    return [document for _, document in sorted(documents, key=lambda pair: pair[0])]


def _batch(target: Target, tokenizer: Tokenizer, settings: WritingSettings) -> EndlessBatch:
    return EndlessBatch(
        target,
        rows=settings.rows,
        context=settings.context,
        stop_ids=tokenizer.eos_ids,
        seed=settings.seed,
    )


def _is_enough(report: WritingReport, settings: WritingSettings) -> bool:
    if settings.seconds is not None and report.seconds >= settings.seconds:
        return True
    return settings.answer_tokens is not None and report.answer_tokens >= settings.answer_tokens
