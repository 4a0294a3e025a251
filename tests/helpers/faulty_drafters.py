"""A third party's drafter that guesses well and, every other time, does one of the things it must not."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.acceptance.rules.trees import Drawn
from foreword.drafters.lookup.ngram import NgramConfig, NgramDrafter
from foreword.drafters.registry import DrafterKind
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftRequest, DraftTask

HANG_SECONDS = 0.3


@dataclass(frozen=True)
class FaultyConfig:
    """What goes wrong."""

    fault: str


class FaultyDrafter:
    def __init__(self, config: FaultyConfig) -> None:
        self._misbehave = FAULTS[config.fault]
        self._honest = NgramDrafter(NgramConfig(prompt_lookup_min=1))
        self._calls = 0

    def propose(self, asks: Sequence[DraftTask]) -> Any:
        self._calls += 1
        return self._misbehave(asks) if self._calls % 2 else self._honest.propose(asks)

    def forget(self, request: DraftRequest) -> None:
        self._honest.forget(request)


def _explode(_: Sequence[DraftTask]) -> None:
    raise RuntimeError("planted")


def _hang(asks: Sequence[DraftTask]) -> list[Draft]:
    time.sleep(HANG_SECONDS)
    return [Draft()] * len(asks)


def _each(tokens: Callable[[DraftTask], Sequence[Any]]) -> Callable[[Sequence[DraftTask]], list[Draft]]:
    """A chain of these tokens for every ask."""
    return lambda asks: [Draft.chain(tokens(ask), *_state(ask)) for ask in asks]


def _state(ask: DraftTask) -> tuple[int, int]:
    return len(ask.request.tokens), ask.request.epoch


def _has_room(ask: DraftTask) -> bool:
    return min(ask.max_nodes, ask.max_depth) > 0


def _drawn_from(ids: list[int], probs: list[float]) -> Callable[[Sequence[DraftTask]], list[Draft]]:
    """One token for every ask, said to be drawn from this."""

    def propose(asks: Sequence[DraftTask]) -> list[Draft]:
        q = Drawn(np.array(ids), np.array(probs))
        return [Draft((ids[0],), (-1,), *_state(ask), (q,)) if _has_room(ask) else Draft() for ask in asks]

    return propose


FAULTS: dict[str, Callable[[Sequence[DraftTask]], Any]] = {
    "raises": _explode,
    "hangs": _hang,
    "returns None": lambda asks: None,
    "returns no drafts": lambda asks: [],
    "returns other things": lambda asks: ["draft"] * len(asks),
    "NaN as a token": _each(lambda ask: [float("nan")]),
    "NaN in q": _drawn_from([5, 6], [float("nan"), 0.5]),
    "a q that sums to 2": _drawn_from([5, 6], [1.0, 1.0]),
    "a q beyond the vocabulary": _drawn_from([5, 10**9], [0.5, 0.5]),
    "an id beyond the vocabulary": _each(lambda ask: [10**9]),
    "a negative id": _each(lambda ask: [-1]),
    "a cycle": lambda asks: [Draft((5, 6), (1, 0), *_state(ask)) for ask in asks],
    "a node that follows itself": lambda asks: [Draft((5,), (0,), *_state(ask)) for ask in asks],
    "too many nodes": _each(lambda ask: [5] * (ask.max_nodes + 1)),
    "hundreds of nodes": _each(lambda ask: [5] * 500),
    "a draft for another text": lambda asks: [
        Draft.chain([5], 3, 99) if _has_room(ask) else Draft() for ask in asks
    ],
}
"""Name -> what `propose` does instead."""

SILENT = "says nothing"
FAULTS[SILENT] = lambda asks: [Draft()] * len(asks)

KIND = DrafterKind("misbehaves every other time", FaultyConfig, lambda settings, _: FaultyDrafter(settings))
