"""`foreword batch`: answer a file of requests."""

import asyncio
import logging
import signal
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.console import loading_bar, log_to_stderr, note, progress_bar
from foreword.cli.options.grouped import options_command
from foreword.cli.options.learn import LearnOptions
from foreword.cli.options.model import (
    DEFAULT_MODEL,
    ComputeOptions,
    GenerationConfigOption,
    ModelOption,
    SpeculationOptions,
)
from foreword.cli.options.serve import need_server_extra
from foreword.cli.serve import EngineOptions, ParsingOptions, prepare
from foreword.progress import Progress

if TYPE_CHECKING:
    from foreword.server.batch import Batch

Requests = Annotated[
    Path,
    typer.Argument(
        metavar="IN.jsonl",
        help='Requests, one per line: {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}.',
    ),
]
Answers = Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Answers; existing ones are kept.")]


@options_command
def batch(
    requests: Requests,
    answers: Answers,
    *,
    model: ModelOption = DEFAULT_MODEL,
    parsing: ParsingOptions,
    drafting: SpeculationOptions,
    generation_config: GenerationConfigOption = "auto",
    engine: EngineOptions,
    compute: ComputeOptions,
) -> None:
    """Answer a file of requests in OpenAI's batch format, without a server.

    A run that was interrupted continues with the same command. Requests may name the routes of OpenAI, Anthropic and
    Ollama. A line that fails has its error in the answers, and the exit code is 0.

    Example: foreword batch in.jsonl out.jsonl --model smollm2-135m
    """
    need_server_extra()
    from foreword.server.batch import open_batch, run_batch
    from foreword.server.settings import Limits, ServerSettings

    log_to_stderr(logging.WARNING)
    choice = drafting.choice()
    limits = Limits(running=engine.max_num_seqs, queued=2**31)  # the whole file may be queued
    settings = ServerSettings(limits=limits, **parsing.settings(model))
    with open_batch(requests, answers) as (work, out), _stopping(work):
        if work.requests or work.refusals:
            start = {"config": engine.config()}
            settings, supervision, checkpoint = prepare(
                model, settings, choice, compute, engine, generation_config, {}, start, LearnOptions()
            )
            tokenizer = checkpoint.tokenizer()
            with ExitStack() as bars:
                on_stage = bars.enter_context(loading_bar())

                def on_ready() -> Progress:
                    return bars.enter_context(progress_bar("answers"))

                answering = run_batch(settings, supervision, tokenizer, work, out, on_stage, on_ready)
                asyncio.run(_until_sigterm(answering))
    counts = work.counts
    before = f"{counts.kept} kept from before"
    if counts.failed_before:
        before += f" ({counts.failed_before} failed then)"
    note(f"{counts.answered} answered, {counts.failed} failed, {before}: {answers}")
    if failed := counts.failed + counts.failed_before:
        note(f"{failed} of {work.total} requests failed; their lines have the errors")


async def _until_sigterm(answering: Coroutine[None, None, None]) -> None:
    """Await the answers; SIGTERM cancels them, also where Ctrl-C is ignored, as in the background of a script."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await answering


@contextmanager
def _stopping(work: "Batch") -> Iterator[None]:
    """End the command on Ctrl-C or SIGTERM; written answers remain in the file."""
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        note(f"{work.counts.done} of {work.total} answered; the same command continues")
        received = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM
        raise typer.Exit(128 + received) from None
