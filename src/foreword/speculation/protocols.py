"""What a step needs of the parts that it is given."""

from collections.abc import Sequence
from typing import Protocol

from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest


class Policy(Protocol):
    """Decides who drafts, with what, how deep, and what of it is verified.

    A policy may also have `notifies(request)`, whether drafters observe the request in the planned pass, and
    `measured`, the policy whose estimates and decisions are reported.
    """

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> Sequence[DraftPlan | None]:
        """One plan for every entry, in the same order.

        Also for a prompt that is still being read: a head that drafts after it reads along. `situation`
        has what was measured so far; each request has its own statistics and what was asked for it. How drafts
        have fared is counted while the next pass is in flight: where steps overlap, the last one's are not in it yet.
        """
        ...

    def trim(
        self, entries: Sequence[PassEntry], drafts: Sequence[Draft], situation: Situation
    ) -> Sequence[Draft]:
        """Now that the drafts are there: what of each the pass verifies (`Draft.keep`, `Draft.within`)."""
        ...

    def rows_wanted(self, requests: Sequence[StepRequest], situation: Situation, beside: int = 1) -> int:
        """Return the rows that the next pass should keep for drafts of these decoding requests."""
        ...

    def learn(self, report: StepReport) -> None:
        """What a step did and what it cost."""
        ...

    def drafters(self) -> Sequence[Drafter]:
        """Drafters that it brings along, besides those that requests ask for."""
        ...


class Target(Protocol):
    """The model whose output distribution is promised, with its KV memory."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One pass over all rows of the batch."""
        ...
