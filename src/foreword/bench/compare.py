"""`foreword bench compare`: Foreword and other engines on the same model, prompts and machine."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import foreword
from foreword.bench.pictures import new_figure, save_figure
from foreword.bench.skeleton import Interval, bootstrap, take_turns
from foreword.errors import RequestError
from foreword.models.sources.builtin import cache_directory
from foreword.progress import StageProgress

OURS, PLAIN = "foreword", "plain"


@dataclass(frozen=True)
class PeerKind:
    """An engine: where it is, what it needs, and its ways to decode, the plain ones first."""

    path: str  # module:class of the `Peer`
    package: str  # that must be there
    modes: Sequence[str]
    plain_modes: Sequence[str] = (PLAIN,)
    draft_mode: str | None = None  # with a draft model, if it takes one


KINDS = {
    OURS: PeerKind(
        "foreword.bench.peers:Ours",
        "foreword",
        (PLAIN, "auto", "suffix+ngram"),
        draft_mode="draft_model",
    ),
    "llama.cpp": PeerKind(
        "foreword.bench.peers:LlamaCpp",
        "llama_cpp",
        ("Q8_0", "Q4_0", "Q8_0 lookup", "Q4_0 lookup"),
        ("Q8_0", "Q4_0"),
    ),
    "transformers": PeerKind(
        "foreword.bench.peers:Transformers",
        "transformers",
        (PLAIN, "prompt lookup"),
        draft_mode="assisted",
    ),
    "vllm": PeerKind("foreword.bench.peers:Vllm", "vllm", (PLAIN, "ngram")),
}


@dataclass(frozen=True)
class Contestant:
    """One engine in one mode, in a process of its own."""

    peer: str
    mode: str
    python: str | None = None  # interpreter that has it; None: this one
    draft: str | None = None  # the draft model's path, where the mode takes one

    @property
    def label(self) -> str:
        return f"{self.peer} {self.mode}"

    @property
    def is_plain(self) -> bool:
        return self.mode in KINDS[self.peer].plain_modes

    @property
    def plain_label(self) -> str:
        """Return the label of the same weights without speculation: of `Q4_0 lookup` it is `Q4_0`."""
        first = self.mode.partition(" ")[0]
        return f"{self.peer} {first if first in KINDS[self.peer].plain_modes else PLAIN}"


def contestants(
    wanted: Sequence[str] | None, pythons: dict[str, str], draft: str | None = None
) -> list[Contestant]:
    """Ourselves and these peers; without a list, whichever are installed here or have an interpreter.

    With a draft model, each that takes one also with it.
    """
    for name in (*(wanted or ()), *pythons):
        if name not in KINDS:
            raise RequestError(f"--peers: there is no {name!r}; there are {', '.join(KINDS)}")
    chosen = [name for name in KINDS if name == OURS or _is_wanted(name, wanted, pythons)]
    found = []
    for name in chosen:
        kind, python = KINDS[name], pythons.get(name)
        found += [Contestant(name, mode, python) for mode in kind.modes]
        if draft is not None and kind.draft_mode is not None:
            found.append(Contestant(name, kind.draft_mode, python, draft))
    return found


def _is_wanted(name: str, wanted: Sequence[str] | None, pythons: dict[str, str]) -> bool:
    is_there = name in pythons or find_spec(KINDS[name].package) is not None
    if wanted is None:
        return is_there
    if name in wanted and not is_there:
        raise RequestError(f"--peers {name}: it is not installed; name an interpreter: --python {name}=PATH")
    return name in wanted


PAUSE_SECONDS = 0.05
"""Between engines: threads of the last one may still spin for a while."""


@dataclass(frozen=True)
class PeerAnswer:
    """One contestant on one prompt in one round."""

    contestant: str
    prompt: int
    round: int
    tokens: int
    first_seconds: float  # to the first token
    first_tokens: int  # that came with it
    seconds: float
    peak_bytes: int
    token_ids: tuple[int, ...]

    @property
    def tokens_per_second(self) -> float:
        """While decoding, after the first portion."""
        return (self.tokens - self.first_tokens) / max(self.seconds - self.first_seconds, 1e-9)


class Runner:
    """A contestant's process."""

    def __init__(self, contestant: Contestant, model: str, threads: int) -> None:
        self.contestant = contestant
        kind = KINDS[contestant.peer]
        command = [
            contestant.python or sys.executable,
            *("-m", "foreword.bench.peers", kind.path, model, contestant.mode, str(threads)),
            *([] if contestant.draft is None else [contestant.draft]),
        ]
        ours = str(Path(foreword.__file__).parents[1])  # another interpreter has not got us
        paths = os.pathsep.join([ours, os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "FOREWORD_THREADS"), str(threads))
        environment["FOREWORD_COMPARE_CACHE"] = str(cache_directory() / "llama.cpp")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        reply = self._read()
        if "error" in reply:
            raise RequestError(f"{contestant.label} cannot be compared: {reply['error']}")

    def answer(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "count": count}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RequestError(f"{self.contestant.label}: its process ended without an answer")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@dataclass(frozen=True)
class Race:
    """What all are asked."""

    model: str
    prompts: Sequence[Sequence[int]]  # token ids: the same for all
    count: int  # tokens of every answer
    rounds: int
    threads: int

    def run(
        self, contestants: Sequence[Contestant], progress: StageProgress
    ) -> tuple[list[PeerAnswer], list[str]]:
        """Every answer, and who could not take part and why. Each is warmed up with the first prompt."""
        answers: list[PeerAnswer] = []
        absent: list[str] = []
        with ExitStack() as stack:
            runners: list[Runner] = []
            for number, contestant in enumerate(contestants):
                progress(f"loading {contestant.label}", number, len(contestants))
                try:
                    runner = Runner(contestant, self.model, self.threads)
                except RequestError as error:
                    absent.append(str(error))
                    continue
                stack.callback(runner.close)
                runner.answer(self.prompts[0], 4)
                runners.append(runner)
            whole = self.rounds * len(self.prompts) * len(runners)

            def ask(runner: Runner, number: int) -> None:
                turn, place = divmod(number, len(self.prompts))
                progress(runner.contestant.label, len(answers), whole)
                sleep(PAUSE_SECONDS)
                reply = runner.answer(self.prompts[place], self.count)
                answers.append(_answer(runner.contestant.label, place, turn, reply))

            arms = {str(place): partial(ask, runner) for place, runner in enumerate(runners)}
            take_turns(arms, self.rounds * len(self.prompts), warm_up=0)
        return answers, absent


def _answer(label: str, prompt: int, turn: int, reply: dict[str, Any]) -> PeerAnswer:
    ids = tuple(reply["tokens"])
    times = {name: reply[name] for name in ("first_seconds", "first_tokens", "seconds", "peak_bytes")}
    return PeerAnswer(label, prompt, turn, len(ids), token_ids=ids, **times)


CONFIDENCE = 0.95


@dataclass(frozen=True)
class ComparisonRow:
    """One contestant."""

    label: str
    tokens_per_second: float  # median while decoding
    ratio: Interval  # to the baseline, answers of the same prompt and round beside each other
    first_ms: float  # median time to the first token
    peak_bytes: int
    same_as_plain: (
        float | None
    )  # share of answers with the text of the same weights without speculation; None: it is off


def baseline(answers: Sequence[PeerAnswer], contestants: Sequence[Contestant]) -> str:
    """The fastest plain peer that took part; ourselves if there is no other."""
    labels = {answer.contestant for answer in answers}
    others = [c.label for c in contestants if c.is_plain and c.peer != OURS and c.label in labels]
    return max(others, key=lambda label: _speed(answers, label), default=f"{OURS} {PLAIN}")


def summarise(
    answers: Sequence[PeerAnswer], contestants: Sequence[Contestant]
) -> tuple[str, list[ComparisonRow]]:
    """The baseline's label and a row for everybody who took part."""
    beside = baseline(answers, contestants)
    rows = []
    for contestant in contestants:
        own = [answer for answer in answers if answer.contestant == contestant.label]
        if own:
            rows.append(_row(contestant, own, answers, beside))
    return beside, rows


def _row(
    contestant: Contestant, own: Sequence[PeerAnswer], answers: Sequence[PeerAnswer], beside: str
) -> ComparisonRow:
    other = {(a.prompt, a.round): a.tokens_per_second for a in answers if a.contestant == beside}
    ratios = [answer.tokens_per_second / other[answer.prompt, answer.round] for answer in own]
    texts = {a.prompt: a.token_ids for a in answers if a.contestant == contestant.plain_label}
    same = sum(answer.token_ids == texts.get(answer.prompt) for answer in own) / len(own)
    return ComparisonRow(
        contestant.label,
        _speed(answers, contestant.label),
        bootstrap(ratios, CONFIDENCE),
        1000 * median(answer.first_seconds for answer in own),
        max(answer.peak_bytes for answer in own),
        None if contestant.is_plain else same,
    )


def _speed(answers: Sequence[PeerAnswer], label: str) -> float:
    return median(answer.tokens_per_second for answer in answers if answer.contestant == label)


def plot_comparison(rows: Sequence[ComparisonRow], baseline: str, path: Path, title: str) -> None:
    """A bar per contestant with its interval, the baseline at 1."""
    figure = new_figure(8, 1.2 + 0.4 * len(rows))
    axes = figure.subplots()
    heights = [row.ratio.middle for row in rows]
    errors = [
        [row.ratio.middle - row.ratio.low for row in rows],
        [row.ratio.high - row.ratio.middle for row in rows],
    ]
    axes.barh([row.label for row in rows], heights, xerr=errors, color="#4c78a8", ecolor="black", capsize=3)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens per second, {baseline} = 1")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)
