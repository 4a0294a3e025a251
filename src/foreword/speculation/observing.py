"""Notifies the observers of a step: drafters, cost estimates, the policy and statistics."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from foreword.backends.batch import ForwardOutput, Tap
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import NO_NEEDS, NO_STATES, Commit, Drafter, DrafterNeeds, KvMemory
from foreword.speculation.measured.situation import Situation
from foreword.speculation.probe import FaultLog
from foreword.speculation.proposing import Plans
from foreword.speculation.protocols import Policy
from foreword.speculation.report import StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest, draft_request_of

Notifies = Callable[[StepRequest], bool]
"""Returns whether the drafter in a request's `speculation` observes the request even in steps that do not plan it."""

_Observers = Sequence[tuple[str, Callable[[StepReport], None]]]
"""Pairs of (stage name for the fault log, observer)."""


class StepObservers:
    """Calls the observers of a step with its report.

    Drafters are called immediately, cost estimates and the policy before the next plan, statistics while the next pass
    is in flight. An observer's exception fails no request.
    """

    def __init__(
        self,
        situation: Situation,
        policy: Policy,
        faults: FaultLog,
        memory: KvMemory | None,
        clock: Callable[[], float],
    ) -> None:
        self._faults, self._memory, self._clock = faults, memory, clock
        self._policy_drafters = list(policy.drafters())
        self._notifies: Notifies | None = getattr(policy, "notifies", None)
        self._planning: _Observers = (("books", situation.learn), ("learn", policy.learn))
        self._others: _Observers = (("books", situation.count),)
        self._reports: list[StepReport] = []  # reports that some observer has not seen
        self._planned = 0  # number of leading reports that the planning observers have seen

    def of_pass(self, entries: Sequence[PassEntry], plans: Plans) -> "Observation":
        """Return which drafters observe which entries of a pass."""
        return Observation.of(entries, plans, self._policy_drafters, self._memory, self._notifies)

    def publish(self, report: StepReport, observation: "Observation", output: ForwardOutput) -> None:
        """Notify the drafters, add the time of this to the report, and store it for the other observers."""
        if any(observation.observers):
            began = self._clock()
            with self._faults.suppressed("observe"):
                observation.notify(report, output)
            report.seconds = replace(report.seconds, observe=self._clock() - began)
        self._reports.append(report)

    def before_plan(self) -> None:
        """Call the observers that the next plan depends on."""
        for report in self._reports[self._planned :]:
            self._call(self._planning, report)
        self._planned = len(self._reports)

    def catch_up(self) -> None:
        """Call all observers with the reports that they have not seen."""
        self.before_plan()
        reports, self._reports, self._planned = self._reports, [], 0
        for report in reports:
            self._call(self._others, report)

    def _call(self, observers: "_Observers", report: StepReport) -> None:
        for stage, observe in observers:
            with self._faults.suppressed(stage):
                observe(report)


class Observer(NamedTuple):
    """A drafter that observes one entry."""

    drafter: Drafter
    needs: DrafterNeeds
    is_on: bool  # whether the plan requested a draft from it for this entry


@dataclass(frozen=True)
class Observation:
    """The drafters that observe each entry of a pass, and the hidden states they need."""

    entries: Sequence[PassEntry]
    observers: Sequence[Sequence[Observer]]  # [entries]
    taps: tuple[Tap, ...] = ()  # union over all observers
    memory: KvMemory | None = None

    @staticmethod
    def of(
        entries: Sequence[PassEntry],
        plans: Plans,
        policy_drafters: Sequence[Drafter],
        memory: KvMemory | None,
        notifies: Notifies | None = None,
    ) -> "Observation":
        """Return the drafters that observe each entry, and register them to be notified of the requests' ends.

        Only drafters with needs observe: the request's drafter, the planned drafter, and the policy's drafters. If the
        policy's `notifies` returns False for a request, its drafter observes it only while it is planned.
        """
        with_needs = [drafter for drafter in policy_drafters if drafter.traits.needs]
        # Most requests of a pass share their drafters, so each combination is resolved once.
        resolved: dict[tuple[int, int], tuple[Mapping[int, Drafter], Sequence[Observer]]] = {}
        observers: list[Sequence[Observer]] = []
        for entry, plan in zip(entries, plans, strict=True):
            requested = entry.request.speculation
            if requested is not None and notifies is not None and not notifies(entry.request):
                requested = None
            if requested is None and plan is None and not with_needs:
                observers.append(())
                continue
            key = (
                id(None if requested is None else requested.drafter),
                id(None if plan is None else plan.drafter),
            )
            if key not in resolved:
                resolved[key] = _observers(requested, plan, with_needs)
            drafters, of_entry = resolved[key]
            entry.request.drafter_view.notified.update(drafters)
            observers.append(of_entry)
        if not any(observers):
            return Observation(entries, observers)
        all_needs = [observer.needs for _, group in resolved.values() for observer in group]
        return Observation(entries, observers, reduce(or_, all_needs, NO_NEEDS).taps, memory)

    @cached_property
    def keeps_states(self) -> list[bool]:
        """Whether the pass keeps the hidden states of each entry, [entries]."""
        if not self.taps:
            return [False] * len(self.observers)
        keeps = {key: any(observer.needs.taps for observer in group) for key, group in self._distinct.items()}
        return [keeps[id(group)] for group in self.observers]

    @cached_property
    def _distinct(self) -> dict[int, Sequence[Observer]]:
        """Distinct observer lists by id(); most entries share one."""
        return {id(group): group for group in self.observers}

    def first_rows(self, drafts: Iterable[Draft]) -> list[int | None]:
        """Return the row of each entry's first hidden state among the kept ones, [entries]; None: none is kept."""
        rows: list[int | None] = []
        first = 0
        for entry, draft, keeps_states in zip(self.entries, drafts, self.keeps_states, strict=True):
            rows.append(first if keeps_states else None)
            if keeps_states:
                first += entry.run + len(draft)
        return rows

    @property
    def wants_draws(self) -> bool:
        """Whether any observer needs the target's sampled token after every node."""
        return any(observer.needs.draws for group in self._distinct.values() for observer in group)

    def notify(self, report: StepReport, output: ForwardOutput) -> None:
        """Send every drafter the commits of its requests that are still active."""
        commits: dict[int, tuple[Drafter, list[Commit]]] = {}
        hidden, memory, results = output.hidden, self.memory, report.requests
        rows = self.first_rows(result.verdict.draft for result in results)
        for entry, group, result, first in zip(self.entries, self.observers, results, rows, strict=True):
            verdict = result.verdict
            if not group or not result.applied or verdict.poisoned:
                continue
            request, draft_begin = draft_request_of(entry.request), entry.computed + entry.run
            states = NO_STATES if first is None else KeptStates(hidden, first, entry.run, verdict.path)
            for drafter, needs, is_on in group:
                commit = Commit(
                    request,
                    entry.computed,
                    entry.run + len(verdict.path),
                    states if needs.taps else NO_STATES,
                    verdict.draft,
                    verdict.draws if needs.draws else (),
                    memory.of(entry.kv) if needs.uses_pages and memory is not None else None,
                    draft_begin,  # accepted draft tokens may be moved later
                    is_on,
                )
                commits.setdefault(id(drafter), (drafter, []))[1].append(commit)
        for drafter, of_drafter in commits.values():
            drafter.observe(of_drafter)


def _observers(
    requested: DraftPlan | None, plan: DraftPlan | None, policy_drafters: Sequence[Drafter]
) -> tuple[Mapping[int, Drafter], Sequence[Observer]]:
    """Return the drafters that observe an entry, by id() and as observers."""
    planned = _choices(plan)
    with_needs = [drafter for drafter in (*_choices(requested), *planned) if drafter.traits.needs]
    drafters = {id(drafter): drafter for drafter in (*with_needs, *policy_drafters)}
    planned_ids = set(map(id, planned))
    observers = [
        Observer(drafter, drafter.traits.needs, key in planned_ids) for key, drafter in drafters.items()
    ]
    return drafters, observers


def _choices(plan: DraftPlan | None) -> Sequence[Drafter]:
    """Return the choices of a plan's drafter, which observe separately, or the drafter if it has none."""
    return () if plan is None else [*plan.drafter.choices.values()] or [plan.drafter]


class KeptStates(Mapping[Tap, Tensor]):
    """The committed rows of one request in the hidden states of a pass, [rows, hidden size], gathered on access."""

    __slots__ = ("_path", "first", "of_pass", "stop")

    def __init__(self, of_pass: Mapping[Tap, Tensor], first: int, run: int, path: Sequence[int]) -> None:
        """Select rows: the run begins at row `first`, the draft tokens follow, and those of `path` are kept."""
        self.of_pass = of_pass
        self.first = first
        # An accepted path 0, 1, 2, ... is contiguous with the run.
        self._path = None if not path or path[-1] == len(path) - 1 else path
        self.stop = first + run + (len(path) if self._path is None else 0)  # end of the contiguous rows

    @property
    def are_together(self) -> bool:
        """Whether the rows are contiguous, from `first` to `stop`."""
        return self._path is None

    def __getitem__(self, tap: Tap) -> Tensor:
        states = self.of_pass[tap]
        if self._path is None:
            is_all = self.stop - self.first == states.shape[0]
            return states if is_all else states[self.first : self.stop]
        kept = torch.tensor([*range(self.first, self.stop), *(self.stop + node for node in self._path)])
        return states[kept.to(states.device)]

    def __iter__(self) -> Iterator[Tap]:
        return iter(self.of_pass)

    def __len__(self) -> int:
        return len(self.of_pass)
