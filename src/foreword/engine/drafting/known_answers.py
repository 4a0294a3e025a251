"""What a request reveals of its answer (a prediction, a grammar), and the drafters that use it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from foreword.drafters.combined import FirstOf, Routed
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import drafter_kinds
from foreword.engine.messages import NewRequest
from foreword.speculation.drafting import Drafter

HINTED_DRAFT_TOKENS = 8
"""Least draft tokens per pass of a request with a prediction or a grammar: most of them are accepted."""


@dataclass(frozen=True)
class AnswerHints:
    """What a request reveals of its answer."""

    prediction: bool = False  # the expected text
    grammar: bool = False  # its response format

    @staticmethod
    def of(new: NewRequest) -> "AnswerHints":
        return AnswerHints(bool(new.prediction), bool(new.params.structured or new.params.thinking))

    def configs(self, is_speculating: bool) -> list[SpeculationConfig]:
        """Return the drafters that are called before all others, the last of them first.

        A prediction turns speculation on; a grammar drafts only where speculation is on anyway.
        """
        carried = ["grammar"] if self.grammar and (is_speculating or self.prediction) else []
        carried += ["prediction"] if self.prediction else []
        return [config for what in carried for config in _followers(what)]


NO_HINTS = AnswerHints()


@cache
def _followers(what: str) -> list[SpeculationConfig]:
    """Return the drafters of requests that carry this."""
    return [
        SpeculationConfig((name,), num_speculative_tokens=HINTED_DRAFT_TOKENS)
        for name, kind in drafter_kinds().items()
        if kind.traits.follows == what
    ]


class HintedDrafter(FirstOf):
    """A drafter that uses a hint, then another of the pool, which counts the users of both."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        # Of its parts, taken together: each speaks where it has something to say.
        reported = [rates for part in drafters if (rates := part.traits.acceptance_by_level)]
        rates = tuple(map(fmean, zip(*reported, strict=False)))
        self.traits = replace(self.traits, acceptance_by_level=rates)


class Chosen(Routed):
    """Several drafters of a pool, one of which is called; the pool counts the users of each."""

    def __init__(self, choices: Mapping[str, Drafter], held: Sequence[Drafter] = ()) -> None:
        """`held` are the pool's drafters where the choices are made of parts of them."""
        super().__init__(choices)
        self.held = held or self.parts


def parts_of(drafter: Drafter) -> Iterator[Drafter]:
    """Yield the pool's own drafters that one is made of."""
    held = drafter.held if isinstance(drafter, Chosen) else ()
    held = drafter.parts if isinstance(drafter, HintedDrafter) else held
    if not held:
        yield drafter
    for part in held:
        yield from parts_of(part)
