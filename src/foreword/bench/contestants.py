"""Engines that Foreword is compared with: their modes, versions and environment."""

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
    """An engine: implementation, package and modes, plain ones first."""

    path: str  # module:class of the `Peer`
    package: str  # required package
    distribution: str  # its distribution
    modes: Sequence[str]
    plain_modes: Sequence[str] = (PLAIN,)
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
        """Return the label of the same weights without speculation: `Q4_0` for `Q4_0 lookup`."""
        first = self.mode.partition(" ")[0]
        return f"{self.peer} {first if first in KINDS[self.peer].plain_modes else PLAIN}"


def contestants(
    wanted: Sequence[str], pythons: dict[str, str], draft: str | None = None, modes: Sequence[str] = ()
) -> list[Contestant]:
    """Return Foreword and the wanted engines; empty: those that are installed or have an interpreter.

    A draft model adds a mode to each engine that supports one. `modes` selects modes; empty: all.
    """
    for name in (*wanted, *pythons):
        if name not in KINDS:
            raise RequestError(f"--peers: there is no {name!r}; there are {', '.join(KINDS)}")
    chosen = [name for name in KINDS if name == OURS or _is_wanted(name, wanted, pythons)]
    found = []
    for name in chosen:
        kind, python = KINDS[name], pythons.get(name)
        found += [Contestant(name, mode, python) for mode in kind.modes]
        if draft is not None and kind.draft_mode is not None:
            found.append(Contestant(name, kind.draft_mode, python, draft))
    known = [mode for name in chosen for mode in KINDS[name].modes]
    if unknown := [mode for mode in modes if mode not in known]:
        raise RequestError(f"--modes: no engine here has {unknown[0]!r}; there are {', '.join(known)}")
    return [one for one in found if not modes or one.mode in modes or one.draft is not None]


def _is_wanted(name: str, wanted: Sequence[str], pythons: dict[str, str]) -> bool:
    is_installed = name in pythons or find_spec(KINDS[name].package) is not None
    if name in wanted and not is_installed:
        raise RequestError(f"--peers {name}: it is not installed; name an interpreter: --python {name}=PATH")
    return name in wanted if wanted else is_installed


def engine_versions(chosen: Sequence[Contestant]) -> dict[str, str]:
    """Return the version of every engine, from its interpreter."""
    pythons = {one.peer: one.python or sys.executable for one in chosen if one.peer != OURS}
    return {OURS: __version__} | {
        name: _version(python, KINDS[name].distribution) for name, python in pythons.items()
    }


def _version(python: str, distribution: str) -> str:
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "of unknown version"


def engine_environment(threads: int) -> Mapping[str, str]:
    """Return an engine's environment: threads, and the path of Foreword for other interpreters."""
    ours = str(Path(foreword.__file__).parents[1])
    path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
    threaded = dict.fromkeys(("OMP_NUM_THREADS", "FOREWORD_THREADS"), str(threads))
    return {**os.environ, **threaded, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
