"""`make mutants`: put each catalogued bug into a copy of the source and see that the tests notice."""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from traceback import print_exc

from catalogue import Mutant
from every import EVERY_MUTANT
from mutation import NoSuchNode, mutated
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
NOT_TRIED = "not tried: no time was left"

FORKS = get_context("fork")
COPIES = FORKS.SimpleQueue()
"""Paths of copies of the source that no worker uses now."""


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant."""

    bug: int
    what: str
    caught: bool
    detail: str  # why not, or which test caught it


PRELOADED = (
    *("torch", "numpy", "tokenizers", "llguidance", "gguf", "huggingface_hub", "httpx2", "safetensors.torch"),
    *("fastapi", "uvicorn", "msgspec", "prometheus_client", "typer", "rich.progress", "hypothesis", "pytest"),
)
"""Packages of others that most tests import: a worker imports them once, its forks start with them."""


def preload() -> None:
    """Import what all forks share; nothing of the package under test, which every mutant imports anew."""
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)


def run_tests(source: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run pytest in a fork that imports the package from `source`; return its exit code and output."""
    arguments = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]

    def run() -> int:
        import pytest

        return int(pytest.main(arguments))

    return run_forked(source, run)


def imported_from(source: Path) -> bool:
    """Return whether a fork really imports the copy, not an installed package."""

    def show() -> int:
        print(import_module("foreword.acceptance").__file__)
        return 0

    return run_forked(source, show)[1].startswith(str(source))


def run_forked(source: Path, work: Callable[[], int]) -> tuple[int, str]:
    """Call `work` in a fork of this process; return its exit code and what it printed."""
    with TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(output.fileno(), sys.stdout.fileno())
                os.dup2(output.fileno(), sys.stderr.fileno())
                import_from(source)
                code = work()
            except BaseException:
                print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        return code, output.read().decode(errors="replace")


def import_from(source: Path) -> None:
    """Import the package from `source` in this process and its children, in spite of an editable install."""
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable_")
    ]
    for name in [name for name in sys.modules if name.partition(".")[0] == "foreword"]:
        del sys.modules[name]  # `find_spec` imported the packages around the extension
    sys.path.insert(0, str(source))
    earlier = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ |= {"PYTHONPATH": os.pathsep.join([str(source), *earlier]), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    os.chdir(ROOT)


def silence_editable_install(source: Path) -> None:
    """Put an empty module in front of an editable install's, so that child processes import from `source`."""
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
        code, output = run_tests(source, mutant.tests)
    finally:
        file.write_text(text, encoding="utf-8")
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    if code == 1 and failed:
        return Outcome(mutant.bug, mutant.what, True, failed[0].split("::")[-1].split(" - ")[0])
    if code != 0:
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


def try_in_worker(mutant: Mutant, until: float) -> Outcome:
    """Try a mutant in a copy of the source that no other worker uses; none begins after `until`."""
    if monotonic() > until:
        return Outcome(mutant.bug, mutant.what, False, NOT_TRIED)
    source = COPIES.get()
    try:
        return try_mutant(mutant, source)
    finally:
        COPIES.put(source)


def tried(
    mutants: Sequence[Mutant], copies: Sequence[Path], console: Console, known: OutcomeFile, until: float
) -> list[Outcome]:
    """Try every mutant that is not known to be caught, as many at once as there are copies of the source."""
    for copy in copies:
        COPIES.put(copy)
    found = {mutant: known.of(mutant) for mutant in mutants}
    with ProcessPoolExecutor(len(copies), FORKS, preload) as workers:
        begun = {
            workers.submit(try_in_worker, mutant, until): mutant
            for mutant, outcome in found.items()
            if outcome is None
        }
        for done in as_completed(begun):
            found[begun[done]] = outcome = done.result()
            if outcome.detail != NOT_TRIED:
                known.add(outcome)
            console.print(f"[dim]bug {outcome.bug}: {outcome.detail}[/dim]")
    return [found[mutant] for mutant in mutants]


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
        if not arguments.trust_tests and run_tests(copies[0], named)[0] != 0:
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
