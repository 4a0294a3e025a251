"""Drafters that follow a hint about the answer: a prediction or a grammar."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from foreword.drafters.combined import FallbackDrafter, RoutedDrafter
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import drafter_kinds
from foreword.engine.messages import NewRequest
from foreword.speculation.drafting import Drafter

HINTED_DRAFT_TOKENS = 8
"""Minimum draft tokens per pass with a prediction or a grammar, since most of these are accepted."""


@dataclass(frozen=True)
class AnswerHints:
    """The kinds of hints that a request has."""

    prediction: bool = False  # the user has sent the expected answer
    grammar: bool = False  # the answer has a prescribed format

    @staticmethod
    def of(new: NewRequest) -> "AnswerHints":
        return AnswerHints(bool(new.prediction), bool(new.params.structured or new.params.thinking))

    def configs(self, is_speculating: bool) -> list[SpeculationConfig]:
        """Return the drafters to call before all others, in reverse order.

        A prediction turns speculation on; a grammar drafts only if speculation is on.
        """
        carried = ["grammar"] if self.grammar and (is_speculating or self.prediction) else []
        carried += ["prediction"] if self.prediction else []
        return [config for what in carried for config in _followers(what)]


NO_HINTS = AnswerHints()


@cache
def _followers(what: str) -> list[SpeculationConfig]:
    """Return the drafters that follow this kind of hint."""
    return [
        SpeculationConfig((name,), num_speculative_tokens=HINTED_DRAFT_TOKENS)
        for name, kind in drafter_kinds().items()
        if kind.traits.follows == what
    ]


class HintedDrafter(FallbackDrafter):
    """A drafter that uses a hint, followed by another drafter of the pool."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        # The mean per level over the parts that publish rates.
        reported = [rates for part in drafters if (rates := part.traits.acceptance_by_level)]
        rates = tuple(map(fmean, zip(*reported, strict=False)))
        self.traits = replace(self.traits, acceptance_by_level=rates)


class PooledChoices(RoutedDrafter):
    """Several drafters of the pool, one of which is called per request."""

    def __init__(self, choices: Mapping[str, Drafter], held: Sequence[Drafter] = ()) -> None:
        """`held` are the pool's drafters if the choices combine parts of them."""
        super().__init__(choices)
        self.held = held or self.parts


def parts_of(drafter: Drafter) -> Iterator[Drafter]:
    """Yield the pool's drafters that a drafter consists of."""
    held = drafter.held if isinstance(drafter, PooledChoices) else ()
    held = drafter.parts if isinstance(drafter, HintedDrafter) else held
    if not held:
        yield drafter
    for part in held:
        yield from parts_of(part)
