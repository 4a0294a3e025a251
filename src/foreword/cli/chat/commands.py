"""The slash commands of a chat."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import RenderableType

from foreword.cli.chat.session import ChatSession, Message, Plan
from foreword.cli.chat.text import position_table, shown_passes, stats_table
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.names import named_methods
from foreword.errors import ForewordError, RequestError
from foreword.paths import user_path

Number = TypeVar("Number", int, float)

DEFAULT_DEPTH = 5  # draft tokens per pass
SHOWN_PASSES = 5  # of /guesses

HELP = """\
/plain            decode without speculation
/method NAME      draft with ngram, suffix, layer_skip, self_quantized, a+b, or a JSON object; auto: as at the start
/depth N          most draft tokens per pass
/temperature X    0 .. 2; 0 is greedy
/top-p X          nucleus sampling: sample from the most likely tokens with this total probability; 1: all
/seed N | off     the same seed gives the same answer; off: a fresh one each time
/retry            answer the last message again, with a fresh seed unless one is set; the new answer replaces the old
/save FILE        write the conversation as JSON; a file that exists is not overwritten
/stats            passes, acceptance and time of the last answer and of the session
/guesses N        drafts of the last N passes (default 5) of the last answer, as lines or trees
/system TEXT      set the system message; without a text, remove it
/reset            forget the conversation; settings stay
/help             this list
/exit, /quit      leave (also Ctrl-D); Ctrl-C stops an answer
//TEXT            send /TEXT to the model"""


@dataclass(frozen=True)
class Reply:
    """Output of a command, and what the chat does next."""

    line: str = ""  # plain text, never markup
    tables: tuple[RenderableType, ...] = ()
    leave: bool = False  # whether the chat ends
    plan: Plan | None = None  # a question to answer now


class Commands:
    """Applies commands to a session: the method `do_x` runs `/x`. An invalid command changes nothing."""

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self._at_start = session.speculation or {}  # empty: speculation was off
        self._depth = int(self._at_start.get("num_speculative_tokens", DEFAULT_DEPTH))

    def run(self, line: str) -> Reply:
        """Run the command of a line; return its output."""
        name, _, argument = line.strip().partition(" ")
        command: Callable[[str], Reply] | None = getattr(self, f"do_{name[1:].replace('-', '_')}", None)
        if command is None:
            return Reply(f"unknown command {name}; /help lists them")
        try:
            return command(argument.strip())
        except ForewordError as error:
            return Reply(" ".join(str(error).split()))

    def do_plain(self, _: str) -> Reply:
        self._session.speculation = None
        return Reply("plain decoding")

    def do_method(self, text: str) -> Reply:
        if not text:
            raise RequestError("/method needs a name such as ngram, or a JSON object")
        if text == "auto":
            if not self._at_start:
                raise RequestError("speculation was off at the start; name a method such as ngram")
            return self._use(self._at_start)
        keys = {"num_speculative_tokens": self._depth, **_method_keys(text)}
        if self._at_start and not text.startswith("{"):  # a name means the initial drafter of that name
            keys = SpeculationConfig.parse(keys, SpeculationConfig.parse(self._at_start)).as_mapping()
        return self._use(keys)

    def do_depth(self, text: str) -> Reply:
        depth = _parsed("/depth", text, int, "a whole number")
        if self._session.speculation is not None:
            return self._use({**self._session.speculation, "num_speculative_tokens": depth})
        SpeculationConfig(("ngram",), num_speculative_tokens=depth)  # refuse an invalid depth
        self._depth = depth
        return Reply(f"{depth} draft tokens per pass once a /method is set; decoding is plain now")

    def _use(self, keys: Mapping[str, Any]) -> Reply:
        """Set the drafter with these keys of a speculation config."""
        config = self._session.use(keys)
        self._depth = config.num_speculative_tokens
        return Reply(f"{'+'.join(config.method)}, up to {self._depth} draft tokens per pass")

    def do_temperature(self, text: str) -> Reply:
        temperature = _parsed("/temperature", text, float, "a number")
        self._session.set_params(temperature=temperature)
        return Reply(f"temperature {temperature:g}{' (greedy)' if temperature == 0 else ''}")

    def do_top_p(self, text: str) -> Reply:
        top_p = _parsed("/top-p", text, float, "a number")
        self._session.set_params(top_p=top_p)
        return Reply(f"top_p {top_p:g}")

    def do_seed(self, text: str) -> Reply:
        seed = None if text == "off" else _parsed("/seed", text, int, "a whole number or off")
        self._session.set_params(seed=seed)
        return Reply("a fresh seed for every answer" if seed is None else f"seed {seed} for every answer")

    def do_retry(self, _: str) -> Reply:
        plan, params = self._session.plan_retry(), self._session.params
        if params.temperature == 0:
            return Reply("temperature 0 gives the same answer again", plan=plan)
        if params.seed is not None:
            return Reply(f"seed {params.seed} is set: the same answer again; see /seed off", plan=plan)
        return Reply(plan=plan)

    def do_save(self, text: str) -> Reply:
        if not text:
            raise RequestError("/save needs the name of a file")
        if not self._session.turns:
            raise RequestError("/save: nothing was answered yet")
        path = user_path(text)
        save_messages(path, self._session.messages)
        return Reply(f"{len(self._session.messages)} messages saved to {path}")

    def do_stats(self, _: str) -> Reply:
        last, total = self._session.last, self._session.total
        if not total.answers:
            return Reply("nothing was answered yet")
        positions = (position_table(last, total),) if total.drafted else ()
        return Reply(tables=(stats_table(last, total), *positions))

    def do_guesses(self, text: str) -> Reply:
        count = _parsed("/guesses", text or str(SHOWN_PASSES), int, "a whole number")
        drafts = self._session.last_drafts
        if count < 1:
            raise RequestError(f"/guesses takes a number of passes, not {count}")
        first = max(len(drafts) - count, 0)
        shown = shown_passes(drafts[first:], first + 1, self._session.token_text)
        return Reply(tables=shown) if shown else Reply("these passes had no draft")

    def do_system(self, text: str) -> Reply:
        self._session.set_system(text or None)
        return Reply("system message set" if text else "no system message")

    def do_reset(self, _: str) -> Reply:
        self._session.reset()
        return Reply("the conversation is forgotten")

    def do_help(self, _: str) -> Reply:
        return Reply(HELP)

    def do_exit(self, _: str) -> Reply:
        return Reply(leave=True)

    do_quit = do_exit


def _method_keys(text: str) -> Mapping[str, Any]:
    """Parse a drafter's name, or its speculation config as JSON."""
    if not text.startswith("{"):
        return named_methods(text)
    try:
        keys: Mapping[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"/method: not JSON: {error}") from None
    return keys


def save_messages(path: Path, messages: list[Message]) -> None:
    """Write a conversation to a new file; on failure, remove the file."""
    document = json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            try:
                file.write(document)
                file.flush()
            except OSError:
                path.unlink()
                raise
    except FileExistsError:
        raise RequestError(f"{path} exists; give the name of a new file") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from None


def _parsed(command: str, text: str, kind: Callable[[str], Number], what: str) -> Number:
    """Return the command's number; `what` describes valid numbers in the error."""
    try:
        return kind(text)
    except ValueError:
        raise RequestError(f"{command} takes {what}, not {text!r}") from None
