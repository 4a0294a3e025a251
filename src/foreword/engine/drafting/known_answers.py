"""What is known of an answer before it is written, and who guesses by it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from foreword.drafters.combined import FirstOf, Routed
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import drafter_kinds
from foreword.engine.messages import NewRequest
from foreword.speculation.drafting import Drafter

FOREKNOWN_TOKENS = 8
"""Guesses per pass for a request that tells what answer it expects, or its form, at least: most of them are right."""


@dataclass(frozen=True)
class Foreknowledge:
    """What a request tells of its answer."""

    prediction: bool = False  # what to expect
    grammar: bool = False  # its form

    @staticmethod
    def of(new: NewRequest) -> "Foreknowledge":
        return Foreknowledge(bool(new.prediction), new.params.structured is not None)

    def configs(self, is_guessing: bool) -> list[SpeculationConfig]:
        """Who is asked before all others, the last of them first.

        A prediction is for guessing; a form is followed where guesses are made anyway.
        """
        carried = ["grammar"] if self.grammar and (is_guessing or self.prediction) else []
        carried += ["prediction"] if self.prediction else []
        return [config for what in carried for config in _followers(what)]


NOTHING_KNOWN = Foreknowledge()


@cache
def _followers(what: str) -> list[SpeculationConfig]:
    """Return the drafters of requests that carry this."""
    return [
        SpeculationConfig((name,), num_speculative_tokens=FOREKNOWN_TOKENS)
        for name, kind in drafter_kinds().items()
        if kind.traits.follows == what
    ]


class Foreknown(FirstOf):
    """A drafter that knows something of the answer and another of a pool's, which counts their users one by one."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        # Of its parts, taken together: each speaks where it has something to say.
        told = [rates for part in drafters if (rates := part.traits.acceptance_by_level)]
        rates = tuple(map(fmean, zip(*told, strict=False)))
        self.traits = replace(self.traits, acceptance_by_level=rates)


class Chosen(Routed):
    """Several of a pool's drafters, one of which is asked; counted in the same way."""

    def __init__(self, choices: Mapping[str, Drafter], held: Sequence[Drafter] = ()) -> None:
        """`held` are the pool's drafters where the choices are made of parts of them."""
        super().__init__(choices)
        self.held = held or self.parts


def parts_of(drafter: Drafter) -> Iterator[Drafter]:
    """The pool's own drafters that one is made of."""
    held = drafter.held if isinstance(drafter, Chosen) else ()
    held = drafter.parts if isinstance(drafter, Foreknown) else held
    if not held:
        yield drafter
    for part in held:
        yield from parts_of(part)
