"""Common parts of the benchmarks: help texts, reports, prompts and provenance."""

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foreword import __version__
from foreword.bench.prompts import BenchPrompt, own_prompts, read_prompts
from foreword.cli.console import fields_of, print_table
from foreword.cli.options.model import ModelCommand

BATCH_SIZES = "Batch sizes, separated by commas."
TIMED_ROUNDS = "Timed rounds; the median is reported."
SPECULATIVE_DRAFTER = "Drafter of the speculative runs, as a JSON object."
MOST_TOKENS = "Most tokens of an answer."
TEMPERATURE = "Sampling temperature; 0 is greedy."
DATASET = "JSON lines as in Spec-Bench, HumanEval or GSM8K. Default: the shipped prompts."


@dataclass(frozen=True, kw_only=True)
class Benchmark(ModelCommand):
    """A benchmark of a loaded model."""

    def report(self, rows: Sequence[Any], title: str | None = None, **more: object) -> None:
        """Print the rows as a table; with --json also the model, `more` and the fields of the rows."""
        print_table(rows, title=title)
        self.show_json({"model": self.model, **more, "rows": fields_of(rows)})


def prompts_of(dataset: Path | None) -> list[BenchPrompt]:
    """Return the prompts of a file, or the shipped ones."""
    return own_prompts() if dataset is None else read_prompts(dataset)


_FOLDERS = re.compile(r"(^|=)/(?:[^/]+/)*")
"""Folders of absolute paths, also as in `llama.cpp=/opt/bin/python`. They mean nothing on other machines."""


def provenance() -> dict[str, str]:
    """Return the command (without folders), the version, the day and the machine of a measurement."""
    return {
        "command": shlex.join(["foreword", *(_FOLDERS.sub(r"\1", part) for part in sys.argv[1:])]),
        "version": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores{_processor_name()}, {platform.system()}",
    }


def _processor_name() -> str:
    """Return the processor's name after a comma; empty if /proc does not have it."""
    try:
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    except OSError:
        return ""
    return "" if match is None else f", {match[1]}"
