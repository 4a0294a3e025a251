"""`foreword bench compare`: Foreword and other engines on the same model, prompts and machine."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any, cast

from foreword.bench.contestants import KINDS, OURS, Contestant, engine_environment
from foreword.bench.llama_cpp import CACHE
from foreword.bench.pictures import saved_figure
from foreword.bench.skeleton import ENGINE_PAUSE, PLAIN, Interval, bootstrap, take_turns
from foreword.errors import RequestError
from foreword.models.sources.builtin import cache_directory
from foreword.progress import StageProgress


@dataclass(frozen=True)
class PeerAnswer:
    """One contestant's answer to one prompt in one round."""

    contestant: str
    prompt: int
    round: int
    tokens: int
    first_seconds: float  # time to the first tokens
    first_tokens: int  # tokens that arrived then
    seconds: float
    peak_bytes: int
    token_ids: tuple[int, ...]

    @property
    def key(self) -> tuple[str, int, int]:
        return self.contestant, self.prompt, self.round

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first tokens."""
        return (self.tokens - self.first_tokens) / max(self.seconds - self.first_seconds, 1e-9)


class Runner:
    """The process of one contestant, which answers one prompt at a time."""

    def __init__(self, contestant: Contestant, model: str, threads: int, device: str) -> None:
        self.contestant = contestant
        kind = KINDS[contestant.peer]
        command = [
            contestant.python or sys.executable,
            *("-m", "foreword.bench.peers", kind.path, model, contestant.mode, str(threads), device),
            *([] if contestant.draft is None else [contestant.draft]),
        ]
        environment = {**engine_environment(threads), CACHE: str(cache_directory() / "llama.cpp")}
        pipe, ignored = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=ignored, text=True, env=environment
        )
        reply = self._read()
        if "error" in reply:
            raise RequestError(f"{contestant.label} cannot be compared: {reply['error']}")

    def answer(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        """Return the process's answer of `count` tokens, with its times, as `bench/peers.py` reports it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "count": count}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RequestError(f"{self.contestant.label}: its process ended without an answer")
        return cast(dict[str, Any], json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)  # closes the pipes


@dataclass(frozen=True)
class Race:
    """Common settings of all contestants."""

    model: str
    prompts: Sequence[Sequence[int]]  # token ids, equal for all
    count: int  # tokens per answer
    rounds: int
    threads: int
    device: str = "cpu"

    def run(
        self,
        contestants: Sequence[Contestant],
        progress: StageProgress,
        known: Sequence[PeerAnswer] = (),
        keep: Callable[[PeerAnswer], None] = lambda _: None,
    ) -> tuple[list[PeerAnswer], list[str]]:
        """Return all answers of the engines that did not fail, and the error of each that did.

        Engines are warmed up with the first prompt. `known` answers are not measured again; `keep` receives new ones.
        """
        answers, known_keys = list(known), {answer.key for answer in known}
        turns = [(prompt, number) for number in range(self.rounds) for prompt in range(len(self.prompts))]
        failed: dict[str, str] = {}  # error by contestant
        with ExitStack() as stack:
            runners: list[Runner] = []
            for number, contestant in enumerate(contestants):
                progress(f"loading {contestant.label}", number, len(contestants))
                if all((contestant.label, *turn) in known_keys for turn in turns):
                    continue
                try:
                    runner = Runner(contestant, self.model, self.threads, self.device)
                    stack.callback(runner.close)
                    runner.answer(self.prompts[0], 4)
                except RequestError as error:
                    failed[contestant.label] = str(error)
                    continue
                runners.append(runner)

            def measure(runner: Runner, turn: int) -> None:
                label, (prompt, number) = runner.contestant.label, turns[turn]
                if (label, prompt, number) in known_keys or label in failed:
                    return
                progress(label, len(answers), len(turns) * len(contestants))
                sleep(ENGINE_PAUSE)
                try:
                    reply = runner.answer(self.prompts[prompt], self.count)
                except RequestError as error:
                    failed[label] = str(error)
                    return
                ids = tuple(reply.pop("tokens"))
                answers.append(PeerAnswer(label, prompt, number, len(ids), token_ids=ids, **reply))
                keep(answers[-1])

            # Every turn runs all engines on the same prompt, so that slow periods of the machine affect them alike.
            arms = {str(index): partial(measure, runner) for index, runner in enumerate(runners)}
            take_turns(arms, len(turns), warm_up=0)
        complete = [answer for answer in answers if answer.contestant not in failed]
        return complete, list(failed.values())


CONFIDENCE = 0.95


@dataclass(frozen=True)
class ComparisonRow:
    """Results of one contestant."""

    label: str
    tokens_per_second: float  # median while decoding
    ratio: Interval  # ratio to the baseline's answer of the same prompt and round
    first_ms: float  # median time to the first token
    peak_bytes: int
    # Fraction of answers whose text speculation did not change; None: it is off, or the plain text was not measured.
    same_as_plain: float | None


def baseline(answers: Sequence[PeerAnswer], contestants: Sequence[Contestant]) -> str:
    """Return the label of the fastest plain engine besides Foreword.

    Without any, it is that of Foreword's plain decoding, and without this, that of the first contestant with answers.
    """
    labels = {answer.contestant for answer in answers}
    measured = [one for one in contestants if one.label in labels]
    others = [one.label for one in measured if one.is_plain and one.peer != OURS]
    ours = f"{OURS} {PLAIN}"
    own = ours if ours in labels or not measured else measured[0].label
    return max(others, key=lambda label: _speed(answers, label), default=own)


def summarise(
    answers: Sequence[PeerAnswer], contestants: Sequence[Contestant]
) -> tuple[str, list[ComparisonRow]]:
    """Return the baseline's label and one row per contestant that has answers."""
    baseline_label, measured = baseline(answers, contestants), {answer.contestant for answer in answers}
    rows = [_row(one, answers, baseline_label) for one in contestants if one.label in measured]
    return baseline_label, rows


def _row(contestant: Contestant, answers: Sequence[PeerAnswer], baseline_label: str) -> ComparisonRow:
    own_answers = [answer for answer in answers if answer.contestant == contestant.label]
    baseline_speeds = {
        (answer.prompt, answer.round): answer.tokens_per_second
        for answer in answers
        if answer.contestant == baseline_label
    }
    ratios = [
        answer.tokens_per_second / baseline_speeds[answer.prompt, answer.round] for answer in own_answers
    ]
    plain_texts = {a.prompt: a.token_ids for a in answers if a.contestant == contestant.plain_label}
    same_texts = sum(answer.token_ids == plain_texts.get(answer.prompt) for answer in own_answers)
    return ComparisonRow(
        contestant.label,
        _speed(answers, contestant.label),
        bootstrap(ratios, CONFIDENCE),
        1000 * median(answer.first_seconds for answer in own_answers),
        max(answer.peak_bytes for answer in own_answers),
        None if contestant.is_plain or not plain_texts else same_texts / len(own_answers),
    )


def _speed(answers: Sequence[PeerAnswer], label: str) -> float:
    return median(answer.tokens_per_second for answer in answers if answer.contestant == label)


def speeds_by_category(
    answers: Sequence[PeerAnswer], categories: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return each contestant's tokens per second by category; `categories` has the category of each prompt."""
    return {
        category: {
            label: _speed([a for a in answers if categories[a.prompt] == category], label)
            for label in dict.fromkeys(answer.contestant for answer in answers)
        }
        for category in dict.fromkeys(categories)
    }


def plot_comparison(rows: Sequence[ComparisonRow], baseline: str, path: Path, title: str) -> None:
    """Draw one horizontal bar with an interval per contestant; the baseline is at 1."""
    ratios = [row.ratio for row in rows]
    lengths = [ratio.middle for ratio in ratios]
    errors = [[one.middle - one.low for one in ratios], [one.high - one.middle for one in ratios]]
    with saved_figure(path, 8, 1.2 + 0.4 * len(rows), title) as figure:
        axes = figure.subplots()
        colours = {"color": "#4c78a8", "ecolor": "black"}
        axes.barh([row.label for row in rows], lengths, xerr=errors, capsize=3, **colours)
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
        axes.invert_yaxis()
        axes.set_xlabel(f"tokens per second, {baseline} = 1")
