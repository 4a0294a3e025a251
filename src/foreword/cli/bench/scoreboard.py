"""`foreword bench scoreboard`: a page of all engines' results, from result files or measured anew."""

import json
import platform
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from foreword.bench.skeleton import command_json
from foreword.cli.bench.common import provenance
from foreword.cli.bench.compare import named_interpreters
from foreword.cli.console import note, say
from foreword.cli.options.common import check_output, split_list
from foreword.cli.options.grouped import Command, flag, given, option
from foreword.cli.options.model import DEFAULT_MODEL
from foreword.errors import RequestError

_OF_MEASURING = ("model", "label", "compare", "prove", "peers", "python", "threads")  # need --measure


@dataclass(frozen=True, kw_only=True)
class Scoreboard(Command):
    """Write a page of all engines' results from result files (bench compare --json, prove --url --json).

    With --measure, first run both for every model and engine that has no result file yet. An interrupted
    run continues where it stopped.

    Example: foreword bench scoreboard --measure --compare '--limit-per-category 1 --max-tokens 32'
    """

    results: Path = option(Path("docs/benchmarks/scoreboard"), "Folder with the result files.")
    out: Path = option(Path("docs/scoreboard.md"), "Page to write.")
    measure: bool = flag("Measure what has no result file yet.")
    model: list[str] | None = option(None, "With --measure: models; repeatable. Default: smollm2-135m.")
    label: str = option(
        f"cpu-{platform.machine()}", "With --measure: this machine's name, for result files and titles."
    )
    compare: str = option("", "With --measure: options of `bench compare`.", metavar="OPTIONS")
    prove: str = option(
        "--brief --minutes 4", "With --measure: options of `prove`, or off.", metavar="OPTIONS"
    )
    peers: str | None = option(None, "With --measure: engines, as for `bench compare`.")
    python: list[str] | None = option(
        None,
        "With --measure: Python that has an engine, such as vllm=/bin/python; repeatable.",
        metavar="PEER=PATH",
    )
    threads: int | None = option(None, "With --measure: threads of every engine. Default: all cores.", min=1)

    def run(self) -> None:
        from foreword.bench.scoreboard import scoreboard_page

        if not self.measure and (of_measuring := given(self, *_OF_MEASURING)):
            raise RequestError(f"{of_measuring[0]} is for measuring; add --measure")
        check_output("--out", self.out)
        # SIGTERM raises SystemExit, so that the servers started by `prove_server` are stopped.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        if self.measure:
            self._measure()
        self.out.write_text(scoreboard_page(self.results), encoding="utf-8")
        say(f"{self.out} is written")

    def _measure(self) -> None:
        from foreword.bench.contestants import contestants
        from foreword.bench.served_engines import SERVED, prove_server
        from foreword.kernels.native import choose_threads
        from foreword.models.sources.resolve import resolve_model

        pythons = named_interpreters(self.python)
        engines = {contestant.peer for contestant in contestants(split_list(self.peers), pythons)}
        threads = self.threads or choose_threads()
        options = shlex.split(self.prove)
        servers = [server for server in SERVED if self.prove != "off" and server.engine in engines]
        self.results.mkdir(parents=True, exist_ok=True)
        for model in self.model or [DEFAULT_MODEL]:
            path, short = resolve_model(model), Path(model).name.removesuffix(".gguf")
            title = {"title": f"{short}, {self.label}, {threads} thread{'s' * (threads > 1)}"}
            self._measure_once(f"{short}-speed", title, partial(self._speed, model, short, threads))
            for server in servers:
                prove = partial(prove_server, server, pythons.get(server.engine), path, threads, options)
                name = f"{short}-proof-{server.label.replace(' ', '-')}"
                self._measure_once(name, {**title, "engine": server.label}, prove)

    def _measure_once(self, name: str, about: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
        """Measure and write the result file, with the fields of `about`; do nothing if the file exists."""
        path = self.results / f"{self.label}-{name}.json"
        if path.exists():
            note(f"{path} exists and is not measured again")
            return
        note(f"measuring {path.stem}")
        result = {"made": provenance()} | measure() | about
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def _speed(self, model: str, short: str, threads: int) -> dict[str, Any]:
        """Run `bench compare` and return its result. Its answers are kept in a file until then, to continue from."""
        answers = self.results / f"{self.label}-{short}-answers.jsonl"
        options = ["--model", model, "--threads", str(threads), "--resume", str(answers)]
        options += [] if self.peers is None else ["--peers", self.peers]
        for python in self.python or ():
            options += ["--python", python]
        result = command_json("bench compare", [*options, *shlex.split(self.compare)])
        answers.unlink()
        return result
