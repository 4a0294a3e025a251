"""`foreword chat` and `foreword run`: chat in the terminal, accepted draft tokens coloured."""

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from foreword.cli.console import load_llm, stderr, stdout, visible
from foreword.cli.options.grouped import option, options_command
from foreword.cli.options.model import (
    DEFAULT_MODEL,
    ComputeOptions,
    GenerationConfigOption,
    LoraOption,
    ModelArgument,
    ModelOption,
    SpeculationOptions,
    SystemOption,
    lora_request,
)
from foreword.errors import ForewordError, RequestError

if TYPE_CHECKING:
    from foreword.cli.chat.commands import Commands
    from foreword.cli.chat.session import AnswerEnd, ChatSession, Plan
    from foreword.cli.chat.text import TextPiece

# Blue and orange: distinguishable for nearly everyone on dark and light backgrounds; as on the page (docs/page.md).
DRAFT_STYLE = "dodger_blue1"
OWN_STYLE = "dark_orange"


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of a conversation."""

    system: SystemOption = None
    temperature: float | None = option(None, "Sampling temperature, 0 to 2; 0 is greedy.")
    top_p: float | None = option(None, "Nucleus sampling: probability mass, such as 0.9; 1: all.")
    seed: int | None = option(None, "Random seed. Default: a fresh one per answer.")
    max_tokens: int = option(512, "Most tokens of an answer.")
    drafting: SpeculationOptions
    generation_config: GenerationConfigOption = "auto"
    lora: LoraOption = None
    compute: ComputeOptions


@options_command
def chat(*, model: ModelOption = DEFAULT_MODEL, options: ChatOptions) -> None:
    """Chat with a model; accepted draft tokens and tokens that the target sampled have different colours.

    /help lists the commands. Lines may be piped in; standard output has the answers and nothing else.
    """
    with _session(model, options) as (session, interrupts):
        _greet()
        _converse(session, interrupts)


@options_command
def run(
    *,
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Argument(help="Message to answer; without it, chat.")] = None,
    options: ChatOptions,
) -> None:
    """Fetch a model if it is not here, then chat with it, or answer one PROMPT.

    Example: foreword run smollm2-135m "Name three colours."
    """
    if not sys.stdin.isatty():
        prompt = _with_input(prompt)
    with _session(model, options) as (session, interrupts):
        if prompt is not None:
            _answer(session.plan(prompt), session, interrupts)
            return
        _greet()
        _converse(session, interrupts)


def _with_input(prompt: str | None) -> str:
    """Return all of standard input followed by the prompt, as `ollama run` puts them."""
    _prepare_input()
    parts = [part for part in (sys.stdin.read().rstrip("\r\n"), prompt) if part]
    if not parts:
        raise RequestError("the prompt is empty; give one as an argument or through the pipe")
    return "\n".join(parts)


@contextmanager
def _session(model: str, options: ChatOptions) -> "Iterator[tuple[ChatSession, Interrupts]]":
    """Check the options, load the model, and yield a session in which Ctrl-C ends answers."""
    from foreword.acceptance.params import SamplingParams

    setting = options.drafting.choice()
    sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "seed", "max_tokens")}
    checked = SamplingParams(**{name: value for name, value in sampling.items() if value is not None})
    from foreword.cli.chat.session import ChatSession, check_temperature
    from foreword.engine.drafting.default_speculation import check_choice

    check_temperature(checked.temperature)
    check_choice(setting)
    llm = load_llm(
        model,
        **asdict(options.compute),
        speculation=setting,
        generation_config=options.generation_config,
        answers=1,
    )
    params = llm.loaded.sampling.params(**sampling)
    config = llm.loaded.choose_speculation(setting).config
    session = ChatSession(llm, params, None if config is None else config.as_mapping())
    session.set_system(options.system)
    session.adapter = llm.adapters.ensure(lora_request(options.lora))
    interrupts = Interrupts()
    with interrupts.installed():
        yield session, interrupts


def _greet() -> None:
    """Print the legend of colours on a terminal, and prepare standard input."""
    if _is_interactive():
        drafted, own = ("accepted draft tokens", DRAFT_STYLE), ("tokens sampled by the target", OWN_STYLE)
        legend = Text.assemble(drafted, ", ", own)
        stderr.print(legend, Text("(/help lists commands, Ctrl-D leaves)", "dim"), soft_wrap=True)
    _prepare_input()


class Interrupts:
    """Handles Ctrl-C: during an answer it ends the answer; at any other time it raises `KeyboardInterrupt`.

    An exception in the middle of a pass would leave the engine's state inconsistent.
    """

    def __init__(self) -> None:
        self._is_interrupted = False
        self._answering = False

    def is_interrupted(self) -> bool:
        return self._is_interrupted

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT within the block."""
        before = signal.signal(signal.SIGINT, self._on_sigint)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Mark an answer as running within the block."""
        self._is_interrupted, self._answering = False, True
        try:
            yield
        finally:
            self._answering = False

    def _on_sigint(self, _: int, __: FrameType | None) -> None:
        if not self._answering:
            raise KeyboardInterrupt
        self._is_interrupted = True


def _converse(session: "ChatSession", interrupts: Interrupts) -> None:
    """Read lines and answer them until the input ends or a command leaves."""
    from foreword.cli.chat.commands import Commands

    commands = Commands(session)
    while True:
        try:
            line = input("> " if _is_interactive() else "").strip()
            if not _take_line(line, session, commands, interrupts):
                return
        except EOFError:
            if sys.stdin.isatty():
                stderr.print()  # the shell continues on a new line
            return
        except KeyboardInterrupt:
            stderr.print()
            say("/exit or Ctrl-D leaves")


def _take_line(line: str, session: "ChatSession", commands: "Commands", interrupts: Interrupts) -> bool:
    """Run a command or answer a line; return False to leave."""
    if line.startswith("/") and not line.startswith("//"):
        reply = commands.run(line)
        if reply.line:
            say(reply.line)
        for table in reply.tables:
            stderr.print(table)
        if reply.plan is not None:
            _answer(reply.plan, session, interrupts)
        return not reply.leave
    if line:
        try:
            _answer(session.plan(line.removeprefix("/")), session, interrupts)
        except ForewordError as error:
            say(" ".join(str(error).split()))
    return True


def _answer(plan: "Plan", session: "ChatSession", interrupts: Interrupts) -> None:
    """Answer a planned question; print the answer, and its statistics or the error."""
    try:
        if plan.dropped:
            say(f"the context is full: the oldest {plan.dropped} of {len(session.turns)} turns are dropped")
        with interrupts.answering():
            end = session.answer(plan, show_piece, interrupts.is_interrupted)
    except ForewordError as error:
        say(" ".join(str(error).split()))
        return
    stdout.out()
    _say_end(end)


def show_piece(piece: "TextPiece") -> None:
    """Print a piece in the colour of its origin, without markup or control sequences."""
    style = DRAFT_STYLE if piece.drafted else OWN_STYLE
    stdout.out(visible(piece.text), end="", style=style, highlight=False)


def _say_end(end: "AnswerEnd") -> None:
    from foreword.cli.chat.text import summary_line

    prefixes = {"abort": "stopped: ", "length": "cut off at the limit: ", "error": f"failed ({end.error}): "}
    dropped = "" if end.text else "; the answer is empty, so the question is dropped"
    statistics = summary_line(end.tally, end.tally.tokens_per_second)
    say(f"{prefixes.get(end.finish_reason, '')}{statistics}{dropped}")


def say(line: str) -> None:
    """Print a line of the program, not of the conversation, to standard error."""
    stderr.print(Text(visible(line), "dim"), soft_wrap=True)


def _prepare_input() -> None:
    """Enable line editing and history on a terminal; tolerate bytes that are not text."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty():
        import readline  # noqa: F401 - `input` edits lines once it is imported


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
