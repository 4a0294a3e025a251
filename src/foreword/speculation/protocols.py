"""Protocols of the policy and the target."""

from collections.abc import Sequence
from typing import Protocol

from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest


class Policy(Protocol):
    """Chooses each request's drafter and draft size, and which draft tokens are verified.

    Optional attributes: `notifies` is an `observing.Notifies`; `measured` is the policy whose estimates and decisions
    are reported.
    """

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> Sequence[DraftPlan | None]:
        """Return one plan per entry, in order; None: no draft.

        Prompt chunks get plans too: a head that drafts after the prompt must read its hidden states. `situation` has
        all measurements; a request has its own statistics and requested drafter. If steps overlap, the last step's
        acceptance is not counted yet.
        """

    def trim(
        self, entries: Sequence[PassEntry], drafts: Sequence[Draft], situation: Situation
    ) -> Sequence[Draft]:
        """Return the part of each draft that the pass verifies (`Draft.keep`, `Draft.within`)."""

    def rows_wanted(self, requests: Sequence[StepRequest], situation: Situation, beside: int = 1) -> int:
        """Return the rows that the next pass should reserve for drafts of these decoding requests.

        `beside` is the number of other requests in the pass; a prompt counts as one.
        """

    def learn(self, report: StepReport) -> None:
        """Receive the report of a step; called for every step, in order."""

    def drafters(self) -> Sequence[Drafter]:
        """Return the drafters that the policy owns, in addition to the requests' own."""


class Target(Protocol):
    """The served model with its KV memory."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one pass; on a GPU, return before it has ended."""
