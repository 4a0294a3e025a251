"""All contestants in turn, prompt by prompt, round by round."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import foreword
from foreword.bench.compare.contestants import KINDS, Contestant
from foreword.errors import RequestError
from foreword.models.sources.builtin import cache_directory
from foreword.progress import StageProgress

PAUSE_SECONDS = 0.05
"""Between engines: threads of the last one may still spin for a while."""


@dataclass(frozen=True)
class Answer:
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
            *("-m", "foreword.bench.compare.worker", kind.path, model, contestant.mode, str(threads)),
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
        told = self._read()
        if "error" in told:
            raise RequestError(f"{contestant.label} cannot be compared: {told['error']}")

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
        told: dict[str, Any] = json.loads(line)
        return told

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
    ) -> tuple[list[Answer], list[str]]:
        """Every answer, and who could not take part and why. Each is warmed up with the first prompt."""
        answers: list[Answer] = []
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
            for turn in range(self.rounds):
                for place, prompt in enumerate(self.prompts):
                    for runner in runners:
                        progress(runner.contestant.label, len(answers), whole)
                        sleep(PAUSE_SECONDS)
                        told = runner.answer(prompt, self.count)
                        answers.append(_answer(runner.contestant.label, place, turn, told))
        return answers, absent


def _answer(label: str, prompt: int, turn: int, told: dict[str, Any]) -> Answer:
    ids = tuple(told["tokens"])
    times = {name: told[name] for name in ("first_seconds", "first_tokens", "seconds", "peak_bytes")}
    return Answer(label, prompt, turn, len(ids), token_ids=ids, **times)
