"""Engines of `bench compare`, Foreword included: their modes, versions and environment."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import foreword
from foreword import __version__
from foreword.bench.skeleton import PLAIN
from foreword.errors import RequestError

OURS = "foreword"


@dataclass(frozen=True)
class PeerKind:
    """An engine: its implementation, package and modes."""

    path: str  # module:class of the `PeerEngine`
    package: str  # package that it imports
    distribution: str  # the package's name on PyPI
    modes: Sequence[str]  # modes without speculation first
    plain_modes: Sequence[str] = (PLAIN,)  # modes without speculation
    draft_mode: str | None = None  # mode with a draft model, if supported


KINDS = {
    OURS: PeerKind(
        "foreword.bench.peers:Ours",
        "foreword",
        "foreword",
        (PLAIN, "auto", "suffix+ngram"),
        draft_mode="draft_model",
    ),
    "llama.cpp": PeerKind(
        "foreword.bench.llama_cpp:LlamaCpp",
        "llama_cpp",
        "llama_cpp_python",
        ("stored", "Q8_0", "Q4_0", "stored lookup", "Q8_0 lookup", "Q4_0 lookup"),
        ("stored", "Q8_0", "Q4_0"),
    ),
    "transformers": PeerKind(
        "foreword.bench.peers:Transformers",
        "transformers",
        "transformers",
        (PLAIN, "prompt lookup"),
        draft_mode="assisted",
    ),
    "vllm": PeerKind("foreword.bench.peers:Vllm", "vllm", "vllm", (PLAIN, "ngram")),
}


@dataclass(frozen=True)
class Contestant:
    """One engine in one mode, in its own process."""

    peer: str
    mode: str
    python: str | None = None  # interpreter; None: this one
    draft: str | None = None  # draft model's path, if the mode needs one

    @property
    def label(self) -> str:
        return f"{self.peer} {self.mode}"

    @property
    def is_plain(self) -> bool:
        return self.mode in KINDS[self.peer].plain_modes

    @property
    def plain_label(self) -> str:
        """Label of the same weights without speculation, such as `llama.cpp Q4_0` for `llama.cpp Q4_0 lookup`."""
        weights = self.mode.partition(" ")[0]
        return f"{self.peer} {weights if weights in KINDS[self.peer].plain_modes else PLAIN}"


def contestants(
    wanted: Sequence[str], pythons: dict[str, str], draft: str | None = None, modes: Sequence[str] = ()
) -> list[Contestant]:
    """Return Foreword and the wanted engines in the wanted modes.

    Without `wanted`, all engines that are installed or have an interpreter take part; without `modes`, all modes.
    A draft model adds a mode to each engine that supports one.
    """
    for name in (*wanted, *pythons):
        if name not in KINDS:
            raise RequestError(f"--peers: there is no {name!r}; there are {', '.join(KINDS)}")
    engines = [name for name in KINDS if name == OURS or _is_wanted(name, wanted, pythons)]
    known_modes = [mode for name in engines for mode in KINDS[name].modes]
    if unknown := [mode for mode in modes if mode not in known_modes]:
        raise RequestError(f"--modes: no engine here has {unknown[0]!r}; there are {', '.join(known_modes)}")
    chosen = []
    for name in engines:
        kind, python = KINDS[name], pythons.get(name)
        chosen += [Contestant(name, mode, python) for mode in kind.modes if not modes or mode in modes]
        if draft is not None and kind.draft_mode is not None:
            chosen.append(Contestant(name, kind.draft_mode, python, draft))
    return chosen


def _is_wanted(name: str, wanted: Sequence[str], pythons: dict[str, str]) -> bool:
    """Return whether an engine takes part; raise `RequestError` if it is named and not installed."""
    is_installed = name in pythons or find_spec(KINDS[name].package) is not None
    if name in wanted and not is_installed:
        raise RequestError(f"--peers {name}: it is not installed; name an interpreter: --python {name}=PATH")
    return name in wanted if wanted else is_installed


def engine_versions(chosen: Sequence[Contestant]) -> dict[str, str]:
    """Return the version of every engine's package, which the engine's own interpreter reports."""
    versions = {OURS: __version__}
    for name, python in {
        one.peer: one.python or sys.executable for one in chosen if one.peer != OURS
    }.items():
        code = f"from importlib.metadata import version; print(version({KINDS[name].distribution!r}))"
        process = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        versions[name] = process.stdout.strip() or "of unknown version"
    return versions


def engine_environment(threads: int) -> Mapping[str, str]:
    """Return an engine's environment: its number of threads, and Foreword's path for other interpreters."""
    source_folder = str(Path(foreword.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source_folder, os.environ.get("PYTHONPATH")]))
    thread_limits = dict.fromkeys(("OMP_NUM_THREADS", "FOREWORD_THREADS"), str(threads))
    return {**os.environ, **thread_limits, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
