"""Which drafters are told what a pass has made final, and what they are told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from foreword.backends.batch import ForwardOutput, Tap
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import NO_NEEDS, Commit, Drafter, DrafterNeeds, Observes, needs_of
from foreword.speculation.requests import PassEntry, as_drafter_sees
from foreword.speculation.verdict import Verdict


@dataclass(frozen=True)
class Observation:
    """The entries of a pass whose drafters need more than tokens."""

    drafters: Sequence[Observes | None]  # [entries]
    taps: tuple[Tap, ...]  # of all of them together

    @staticmethod
    def of(entries: Sequence[PassEntry]) -> "Observation":
        """Whoever drafts for a request is told of it, whether or not it is asked to guess in this pass."""
        drafters = [_observer(entry) for entry in entries]
        needs = NO_NEEDS
        for entry, drafter in zip(entries, drafters, strict=True):
            if drafter is not None:
                needs = needs | drafter.needs
                entry.request.asked[id(drafter)] = cast(Drafter, drafter)  # so that it hears of the end, too
        return Observation(drafters, needs.taps)

    @property
    def wanted(self) -> list[bool]:
        """[entries], whose hidden states are kept."""
        return [drafter is not None and bool(drafter.needs.taps) for drafter in self.drafters]

    @property
    def wants_draws(self) -> bool:
        """Whether any of them needs the target's own draws."""
        return any(drafter is not None and drafter.needs.draws for drafter in self.drafters)

    def tell(
        self,
        entries: Sequence[PassEntry],
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        applied: Sequence[bool],
        output: ForwardOutput,
    ) -> None:
        """Tell every drafter of its requests that are still there."""
        told: dict[int, tuple[Observes, list[Commit]]] = {}
        first = 0
        for index, (entry, drafter) in enumerate(zip(entries, self.drafters, strict=True)):
            if drafter is None:
                continue
            rows = entry.run + len(drafts[index]) if drafter.needs.taps else 0
            if applied[index] and not verdicts[index].poisoned:
                commit = _commit(entry, drafts[index], verdicts[index], drafter.needs, output, first)
                told.setdefault(id(drafter), (drafter, []))[1].append(commit)
            first += rows
        for drafter, commits in told.values():
            drafter.observe(commits)


def _observer(entry: PassEntry) -> Observes | None:
    plan = entry.request.speculation
    drafter = None if plan is None else plan.drafter
    return cast(Observes, drafter) if needs_of(drafter) else None


def _commit(
    entry: PassEntry, draft: Draft, verdict: Verdict, needs: DrafterNeeds, output: ForwardOutput, first: int
) -> Commit:
    """`first` is the entry's first row among those whose hidden states were kept."""
    kept = [*range(first, first + entry.run), *(first + entry.run + node for node in verdict.path)]
    hidden = {}
    if needs.taps:
        rows = torch.tensor(kept, dtype=torch.int64)
        hidden = {tap: output.hidden[tap][rows.to(output.hidden[tap].device)] for tap in needs.taps}
    return Commit(
        as_drafter_sees(entry.request),
        first=entry.computed,
        rows=len(kept),
        hidden=hidden,
        draft=draft,
        draws=verdict.draws if needs.draws else (),
        kv=entry.kv if needs.rows else None,
    )
