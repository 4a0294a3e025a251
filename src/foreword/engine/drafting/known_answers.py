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
from foreword.speculation.requests import DraftPlan

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
        """Return the drafters to call before all others, the first to call at the end.

        A prediction turns speculation on for its request; a grammar drafts only if speculation is on.
        """
        hints = ["grammar"] if self.grammar and (is_speculating or self.prediction) else []
        hints += ["prediction"] if self.prediction else []
        return [config for hint in hints for config in _followers(hint)]


NO_HINTS = AnswerHints()


@cache
def _followers(hint: str) -> list[SpeculationConfig]:
    """Return the drafters that follow this kind of hint, as `Traits.follows` names it."""
    return [
        SpeculationConfig((name,), num_speculative_tokens=HINTED_DRAFT_TOKENS)
        for name, kind in drafter_kinds().items()
        if kind.traits.follows == hint
    ]


class HintedDrafter(FallbackDrafter):
    """A drafter that follows a hint, and another one that is called where the first has no draft."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        # For each level, the mean over the drafters that publish rates.
        published = [rates for drafter in drafters if (rates := drafter.traits.acceptance_by_level)]
        means = tuple(map(fmean, zip(*published, strict=False)))
        self.traits = replace(self.traits, acceptance_by_level=means)


class PooledChoices(RoutedDrafter):
    """Several drafters of the pool, one of which is called per request."""

    def __init__(self, choices: Mapping[str, Drafter], pool_drafters: Sequence[Drafter] = ()) -> None:
        """`pool_drafters` are the drafters that the choices combine; by default the choices themselves."""
        super().__init__(choices)
        self.pool_drafters = pool_drafters or self.parts


def hinted(first: DraftPlan, drafter: Drafter) -> HintedDrafter | PooledChoices:
    """Return a drafter that calls `first` and then `drafter`. If `drafter` has choices, the result has them too."""
    choices = {f"{first.method}+{name}": hinted(first, choice) for name, choice in drafter.choices.items()}
    drafters = [first.drafter, drafter]
    return PooledChoices(choices, drafters) if choices else HintedDrafter(drafters)


def parts_of(drafter: Drafter) -> Iterator[Drafter]:
    """Yield the pool's drafters that a drafter combines, or the drafter itself."""
    if isinstance(drafter, PooledChoices):
        parts = drafter.pool_drafters
    elif isinstance(drafter, HintedDrafter):
        parts = drafter.parts
    else:
        yield drafter
        return
    for part in parts:
        yield from parts_of(part)


def drafters_of(plan: DraftPlan | None) -> Sequence[Drafter]:
    """Return the pool's drafters that a plan uses."""
    return () if plan is None else list(parts_of(plan.drafter))
