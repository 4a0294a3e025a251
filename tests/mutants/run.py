"""`make mutants`: put each catalogued bug into a copy of the source and see that the tests notice."""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from time import monotonic

from catalogue import Mutant
from every import EVERY_MUTANT
from mutation import NoSuchNode, mutated
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
NOT_TRIED = "not tried: no time was left"


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant."""

    bug: int
    what: str
    caught: bool
    detail: str  # why not, or which test caught it


def _environment(source: Path) -> dict[str, str]:
    """Ours, with the copy in front of everything else that is imported from."""
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


def run_tests(source: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Pytest on the named tests, importing the package from `source`; stops at the first failure."""
    environment = _environment(source) | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def imported_from(source: Path) -> bool:
    """Whether the package under test really is the copy, not an installed one."""
    environment = _environment(source)
    command = [sys.executable, "-c", "import foreword.acceptance; print(foreword.acceptance.__file__)"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()).is_relative_to(source)


def silence_editable_install(source: Path) -> None:
    """An editable install leads imports to the original source, whatever the path says; let it find nothing."""
    for name in [name for name in sys.modules if name.startswith("_editable_")]:
        (source / f"{name}.py").write_text("", encoding="utf-8")


def add_extension(source: Path) -> None:
    """An editable install keeps the compiled kernels outside the source; the copy needs them inside."""
    extension = find_spec("foreword.kernels._native")
    if extension is not None and extension.origin is not None:
        shutil.copy2(extension.origin, source / "foreword" / "kernels")


def try_mutant(mutant: Mutant, source: Path) -> Outcome:
    """Apply, test, undo."""
    file = source / "foreword" / mutant.file
    text = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutated(text, mutant.function, mutant.old, mutant.new), encoding="utf-8")
    except NoSuchNode as error:
        return Outcome(mutant.bug, mutant.what, False, f"{mutant.file}: {error}")
    try:
        result = run_tests(source, mutant.tests)
    finally:
        file.write_text(text, encoding="utf-8")
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    if result.returncode == 1 and failed:
        return Outcome(mutant.bug, mutant.what, True, failed[0].split("::")[-1].split(" - ")[0])
    if result.returncode != 0:
        return Outcome(mutant.bug, mutant.what, False, "the named tests did not run")
    return Outcome(mutant.bug, mutant.what, False, "all tests passed")


def copied_source(folder: Path) -> Path:
    """A copy of the package that a mutant can be put into."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    silence_editable_install(source)
    add_extension(source)
    return source


class OutcomeFile:
    """Outcomes of earlier runs, one JSON object per line; every new one is appended at once."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
        self._found = {(one.bug, one.what): one for one in (Outcome(**json.loads(line)) for line in lines)}

    def of(self, mutant: Mutant) -> Outcome | None:
        """What became of a mutant before, if it was caught: the others are tried again."""
        found = self._found.get((mutant.bug, mutant.what))
        return found if found is not None and found.caught else None

    def add(self, outcome: Outcome) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


def tried(
    mutants: Sequence[Mutant], copies: Sequence[Path], console: Console, known: OutcomeFile, until: float
) -> list[Outcome]:
    """Every mutant, as many at once as there are copies of the source; none begins after `until`."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run(mutant: Mutant) -> Outcome:
        if (before := known.of(mutant)) is not None:
            return before
        if monotonic() > until:
            return Outcome(mutant.bug, mutant.what, False, NOT_TRIED)
        source = free.get()
        try:
            outcome = try_mutant(mutant, source)
        finally:
            free.put(source)
        known.add(outcome)
        console.print(f"[dim]bug {mutant.bug}: {outcome.detail}[/dim]")
        return outcome

    with ThreadPoolExecutor(len(copies)) as threads:
        return list(threads.map(run, mutants))


def main() -> int:
    """Run the catalogue; exit code 1 if any bug goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--bug", type=int, help="only the mutants of this number")
    parser.add_argument(
        "--jobs", type=int, default=1, help="mutants that are tried at once, each in its own copy"
    )
    parser.add_argument(
        "--outcomes",
        type=Path,
        help="a file to which every outcome is appended; mutants that it names as caught are not tried again",
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="try no further mutant after this time"
    )
    parser.add_argument(
        "--trust-tests", action="store_true", help="the tests passed already: don't run them without a mutant"
    )
    arguments = parser.parse_args()
    until = monotonic() + arguments.seconds
    chosen = [mutant for mutant in EVERY_MUTANT if arguments.bug in (None, mutant.bug)]
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        copies = [copied_source(Path(folder) / str(number)) for number in range(arguments.jobs)]
        if not imported_from(copies[0]):
            console.print("the tests would not import the copy of the source; is the package installed?")
            return 1
        named = sorted({test for mutant in chosen for test in mutant.tests})
        if not arguments.trust_tests and run_tests(copies[0], named).returncode != 0:
            console.print("the named tests fail without any mutant")
            return 1
        outcomes = tried(chosen, copies, console, OutcomeFile(arguments.outcomes), until)
    table = Table("bug", "what goes wrong", "", "by")
    for outcome in outcomes:
        mark = "[green]caught[/green]" if outcome.caught else "[red]MISSED[/red]"
        table.add_row(str(outcome.bug), outcome.what, mark, outcome.detail)
    console.print(table)
    missed = [outcome for outcome in outcomes if not outcome.caught]
    if arguments.json:
        print(json.dumps({"passed": not missed, "mutants": [asdict(outcome) for outcome in outcomes]}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
