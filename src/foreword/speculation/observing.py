"""Which drafters are told what a pass has made final, and what they are told."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import NamedTuple, cast

from torch import Tensor

from foreword.backends.batch import ForwardOutput, Tap
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import (
    NO_NEEDS,
    Commit,
    Drafter,
    DraftRequest,
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


@dataclass(frozen=True)
class Observer:
    """A drafter that is told of an entry."""

    drafter: Observes
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
        known: dict[tuple[int, int], dict[int, Observer]] = {}
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
            for number, one in known[key].items():
                entry.request.asked[number] = cast(Drafter, one.drafter)  # so that it hears of the end, too
            observers.append(tuple(known[key].values()))
        if not any(observers):
            return Observation(observers)
        each = {number: one.drafter.needs for some in known.values() for number, one in some.items()}
        return Observation(observers, reduce(or_, each.values(), NO_NEEDS).taps, memory)

    @property
    def wanted(self) -> list[bool]:
        """[entries], whose hidden states are kept."""
        if not self.taps:
            return [False] * len(self.observers)
        return [any(one.drafter.needs.taps for one in some) for some in self.observers]

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
        return any(one.drafter.needs.draws for some in self.observers for one in some)

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
        first_rows = self.first_rows(entries, drafts)
        for index, (entry, some) in enumerate(zip(entries, self.observers, strict=True)):
            if some and applied[index] and not verdicts[index].poisoned:
                final = _Final.of(entry, drafts[index], verdicts[index], output, first_rows[index])
                for one in some:
                    commit = self._commit(entry, one, final)
                    told.setdefault(id(one.drafter), (one.drafter, []))[1].append(commit)
        for drafter, commits in told.values():
            drafter.observe(commits)

    def _commit(self, entry: PassEntry, observer: Observer, final: "_Final") -> Commit:
        needs, memory = observer.drafter.needs, self.memory
        return Commit(
            final.request,
            first=entry.computed,
            rows=final.rows,
            hidden=final.hidden if needs.taps else {},
            draft=final.draft,
            draws=final.draws if needs.draws else (),
            pages=memory.of(entry.kv) if needs.rows and memory is not None else None,
            settled=entry.computed + entry.run,
            is_on=observer.is_on,
        )


def _observers(
    own: DraftPlan | None, plan: DraftPlan | None, brought: Sequence[Drafter]
) -> dict[int, Observer]:
    """By the drafter's id()."""
    watching = [
        drafter
        for one in (own, plan)
        if one is not None
        for drafter in _parts(one.drafter)
        if needs_of(drafter)
    ]
    planned = () if plan is None else [id(drafter) for drafter in _parts(plan.drafter)]
    found = {id(drafter): drafter for drafter in (*watching, *brought)}
    return {number: Observer(cast(Observes, drafter), number in planned) for number, drafter in found.items()}


def _parts(drafter: Drafter) -> Iterable[Drafter]:
    """Those that a policy chooses between are told one by one: the one that it has chosen only once."""
    return choices_of(drafter).values() or (drafter,)


class _Final(NamedTuple):
    """What a pass has made final for one entry, whoever is told."""

    request: DraftRequest
    rows: int
    hidden: Mapping[Tap, Tensor]
    draft: Draft
    draws: tuple[int, ...]

    @staticmethod
    def of(
        entry: PassEntry, draft: Draft, verdict: Verdict, output: ForwardOutput, first: int | None
    ) -> "_Final":
        """`first` is the entry's first row among those whose hidden states were kept; None: none were."""
        rows = entry.run + len(verdict.path)
        hidden = {} if first is None else KeptStates(output.hidden, first, entry.run, verdict.path)
        return _Final(as_drafter_sees(entry.request), rows, hidden, draft, verdict.draws)
