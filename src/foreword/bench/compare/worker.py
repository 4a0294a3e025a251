"""One contestant in a process of its own: JSON lines in, JSON lines out.

Started as `python -m foreword.bench.compare.worker PATH MODEL MODE THREADS [DRAFT]`. What engines print goes to
standard error.
"""

import importlib
import json
import os
import sys
from time import perf_counter
from typing import IO, Any

from foreword.bench.costs.memory import peak_resident_bytes


def main() -> None:
    """Load, say so, then answer until the input ends."""
    path, model, mode, threads, *draft = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        module, _, name = path.partition(":")
        peer = getattr(importlib.import_module(module), name)(model, mode, int(threads), *draft)
    except Exception as error:  # whatever an engine says when it cannot
        _tell(out, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        return
    _tell(out, {"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        _tell(out, _answer(peer, asked["prompt"], asked["count"]))


def _answer(peer: Any, prompt: list[int], count: int) -> dict[str, Any]:  # noqa: ANN401 - of any engine
    began = perf_counter()
    first: float | None = None
    first_tokens = 0
    tokens: list[int] = []
    for portion in peer.tokens(prompt, count):
        tokens += portion
        if first is None and tokens:
            first, first_tokens = perf_counter() - began, len(tokens)
    return {
        "tokens": tokens,
        "first_seconds": first or 0.0,
        "first_tokens": first_tokens,
        "seconds": perf_counter() - began,
        "peak_bytes": peak_resident_bytes(),
    }


def _tell(out: IO[str], value: dict[str, Any]) -> None:
    print(json.dumps(value), file=out, flush=True)


if __name__ == "__main__":
    main()
