"""Which drafters are told what a pass has made final, and what they are told."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import NamedTuple, cast

from foreword.backends.batch import ForwardOutput, Tap
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import (
    NO_NEEDS,
    NO_STATES,
    Commit,
    Drafter,
    DrafterNeeds,
    KvMemory,
    Observes,
    choices_of,
    needs_of,
)
from foreword.speculation.kept_states import KeptStates
from foreword.speculation.proposing import Plans
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest, as_drafter_sees
from foreword.speculation.verdict import Verdict

Tells = Callable[[StepRequest], bool]
"""Whether a request's own drafter is told of it."""


class Observer(NamedTuple):
    """A drafter that is told of an entry."""

    drafter: Observes
    needs: DrafterNeeds
    is_on: bool  # whether it was meant to guess for it in this step


@dataclass(frozen=True)
class Observation:
    """The entries of a pass whose drafters need more than tokens."""

    observers: Sequence[Sequence[Observer]]  # [entries]
    taps: tuple[Tap, ...] = ()  # of all of them together
    memory: KvMemory | None = None

    @staticmethod
    def of(
        entries: Sequence[PassEntry],
        plans: Plans,
        brought: Sequence[Drafter],
        memory: KvMemory | None,
        tells: Tells | None = None,
    ) -> "Observation":
        """Whoever may draft for a request is told of it, whether or not it is asked to guess in this pass.

        These are the request's own drafter, the one that the policy has planned, and those that it `brought` along. A
        policy that leaves a drafter out for long may say so by `tells`: then of its own only the planned one is told.
        """
        watching = [drafter for drafter in brought if needs_of(drafter)]
        # Most requests of a pass have the same drafters: who they are is worked out once.
        known: dict[tuple[int, int], tuple[Mapping[int, Drafter], Sequence[Observer]]] = {}
        observers: list[Sequence[Observer]] = []
        for entry, plan in zip(entries, plans, strict=True):
            own = entry.request.speculation
            if own is not None and tells is not None and not tells(entry.request):
                own = None
            if own is None and plan is None and not watching:
                observers.append(())
                continue
            key = (id(None if own is None else own.drafter), id(None if plan is None else plan.drafter))
            if key not in known:
                known[key] = _observers(own, plan, watching)
            drafters, some = known[key]
            entry.request.asked.update(drafters)  # so that they hear of the end, too
            observers.append(some)
        if not any(observers):
            return Observation(observers)
        each = [one.needs for _, some in known.values() for one in some]
        return Observation(observers, reduce(or_, each, NO_NEEDS).taps, memory)

    @cached_property
    def wanted(self) -> list[bool]:
        """[entries], whose hidden states are kept."""
        if not self.taps:
            return [False] * len(self.observers)
        known = {number: any(one.needs.taps for one in some) for number, some in self._distinct.items()}
        return [known[id(some)] for some in self.observers]

    @cached_property
    def _distinct(self) -> dict[int, Sequence[Observer]]:
        """Those of all entries by their id(): most have the same."""
        return {id(some): some for some in self.observers}

    def first_rows(self, entries: Sequence[PassEntry], drafts: Sequence[Draft]) -> list[int | None]:
        """[entries], where the hidden states of each begin among those that are kept; None: its are not."""
        places: list[int | None] = []
        first = 0
        for entry, draft, is_wanted in zip(entries, drafts, self.wanted, strict=True):
            places.append(first if is_wanted else None)
            if is_wanted:
                first += entry.run + len(draft)
        return places

    @property
    def wants_draws(self) -> bool:
        """Whether any of them needs the target's own draws."""
        return any(one.needs.draws for some in self._distinct.values() for one in some)

    def tell(
        self,
        entries: Sequence[PassEntry],
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        applied: Sequence[bool],
        output: ForwardOutput,
    ) -> None:
        """Tell every drafter of its requests that are still there."""
        if not any(self.observers):
            return
        told: dict[int, tuple[Observes, list[Commit]]] = {}
        hidden, memory = output.hidden, self.memory
        of_all = zip(
            entries,
            self.observers,
            drafts,
            verdicts,
            applied,
            self.first_rows(entries, drafts),
            strict=True,
        )
        for entry, some, draft, verdict, is_there, first in of_all:
            if not some or not is_there or verdict.poisoned:
                continue
            request, settled = as_drafter_sees(entry.request), entry.computed + entry.run
            states = NO_STATES if first is None else KeptStates(hidden, first, entry.run, verdict.path)
            for drafter, needs, is_on in some:
                commit = Commit(
                    request,
                    entry.computed,
                    entry.run + len(verdict.path),
                    states if needs.taps else NO_STATES,
                    draft,
                    verdict.draws if needs.draws else (),
                    memory.of(entry.kv) if needs.rows and memory is not None else None,
                    settled,
                    is_on,
                )
                heard = told.get(id(drafter))
                if heard is None:
                    heard = told[id(drafter)] = drafter, []
                heard[1].append(commit)
        for drafter, commits in told.values():
            drafter.observe(commits)


def _observers(
    own: DraftPlan | None, plan: DraftPlan | None, brought: Sequence[Drafter]
) -> tuple[Mapping[int, Drafter], Sequence[Observer]]:
    """The drafters by their id(), and what they are told."""
    watching = [
        drafter
        for one in (own, plan)
        if one is not None
        for drafter in _parts(one.drafter)
        if needs_of(drafter)
    ]
    planned = () if plan is None else [id(drafter) for drafter in _parts(plan.drafter)]
    found = {id(drafter): drafter for drafter in (*watching, *brought)}
    observers = [
        Observer(cast(Observes, drafter), needs_of(drafter), number in planned)
        for number, drafter in found.items()
    ]
    return found, observers


def _parts(drafter: Drafter) -> Iterable[Drafter]:
    """Those that a policy chooses between are told one by one: the one that it has chosen only once."""
    return choices_of(drafter).values() or (drafter,)
