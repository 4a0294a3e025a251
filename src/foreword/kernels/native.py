"""Availability of the compiled CPU kernels; selection of their instruction set and number of threads."""

import os
from dataclasses import dataclass
from importlib.util import find_spec

from foreword.errors import RequestError

ISA_VARIABLE = "FOREWORD_ISA"
"""Environment variable that selects an instruction set."""

TILED_ISA = "avx512-amx"
"""Instruction set whose products of many tokens run in tiles. All else, and all bits, are those of avx512-vnni."""

THREADS_VARIABLE = "FOREWORD_THREADS"
"""Environment variable with the number of threads."""

THREADS_PER_CORE = 4
"""Maximum number of threads per core: a pass has hundreds of barriers, which are slow with more."""

ALWAYS_ALLOWED_THREADS = 16
"""This many threads are allowed on a machine with few cores, too."""


@dataclass(frozen=True)
class NativeStatus:
    """Whether the compiled kernels can be used."""

    available: bool
    reason: str  # why they cannot be used; empty if they can
    instruction_sets: tuple[str, ...]  # of the build that this CPU supports, fastest first


def native_status() -> NativeStatus:
    """Load the compiled kernels, if they exist, and return their status."""
    if find_spec("foreword.kernels._native") is None:
        return NativeStatus(False, "the package was installed without them (no C++ compiler)", ())
    try:
        from foreword.kernels import _native
    except ImportError as error:
        return NativeStatus(False, f"they do not load here: {' '.join(str(error).split())}", ())
    return NativeStatus(True, "", tuple(_native.instruction_sets()))


def choose_isa(names: tuple[str, ...]) -> str:
    """Return the first of these instruction sets, or the one that `FOREWORD_ISA` names."""
    wanted = os.environ.get(ISA_VARIABLE, "")
    if not wanted:
        return names[0]
    if wanted not in names:
        raise RequestError(f"{ISA_VARIABLE}={wanted} is not available here; use one of {', '.join(names)}")
    return wanted


def explain_isa(isa: str) -> str:
    """Return why `choose_isa` returned this instruction set and, if products run in tiles, in which passes."""
    reason = f"{ISA_VARIABLE} names it" if os.environ.get(ISA_VARIABLE) else "the fastest here"
    if isa != TILED_ISA:
        return reason
    from foreword.kernels import _native

    return (
        f"{reason}; AMX tiles for {_native.MIN_TILED_TOKENS} tokens or more in a pass, with blocks "
        f"{_native.MIN_TILED_BLOCK_TOKENS}; same bits as avx512-vnni, which runs all else"
    )


def choose_threads(threads: int | None = None) -> int:
    """Return the given number of threads, that of `FOREWORD_THREADS`, or one per available core."""
    if threads is None:
        text = os.environ.get(THREADS_VARIABLE, "")
        if not text:
            return _usable_cores()
        if not text.isdecimal():
            raise RequestError(f"{THREADS_VARIABLE} must be a number of threads, not {text!r}")
        threads = int(text)
    if threads < 1:
        raise RequestError(f"the number of threads must be at least 1, not {threads}")
    most = max(ALWAYS_ALLOWED_THREADS, THREADS_PER_CORE * (os.cpu_count() or 1))
    if threads > most:
        raise RequestError(f"the number of threads must be at most {most} on this machine, not {threads}")
    return threads


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
