"""Which drafters may draft before the verdict of a pass, and which hidden states they read."""

from types import SimpleNamespace
from typing import Any

import torch

from foreword.backends.batch import Tap
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DrafterNeeds, InFlight, KvMemory, Traits
from foreword.speculation.observing import Observation, Observer
from foreword.speculation.pipeline import Launched, draft_early
from foreword.speculation.proposing import Proposal
from foreword.speculation.requests import DraftPlan, PassEntry
from helpers.pending_drafts import left_pending
from helpers.requests import lone_request

NEEDS = DrafterNeeds(taps=(Tap(1),))
FIRST_ROWS = (0, 5)
"""Rows of the pass's draws with which the two entries begin."""


class Early(Drafter):
    """A drafter that notes what it may draft after."""

    traits = Traits(starts_early=True)

    def __init__(self) -> None:
        self.seen: list[InFlight] = []

    def draft_early(self, unjudged: list[InFlight], hidden: Any, drawn: Any) -> bool:
        self.seen += unjudged
        return False


def run_of(length: int, cache: PagedCache) -> PassEntry:
    """A request whose pass reads so many committed tokens."""
    request = lone_request(list(range(1, length + 1)))
    request.kv = cache.open()
    return PassEntry.of(request, length)


def noted(first_is_on: bool) -> list[InFlight]:
    """What a drafter notes of a pass over runs of 3 and 4 tokens with 2 draft tokens after each."""
    cache, drafter = PagedCache(8), Early()
    entries = [run_of(3, cache), run_of(4, cache)]
    drafts = left_pending([Draft.chain([7, 8], len(entry.request.tokens)) for entry in entries])
    plan: Any = DraftPlan("early", drafter, 2, 2)  # type: ignore[arg-type]
    observers = [(Observer(drafter, NEEDS, is_on),) for is_on in (first_is_on, True)]  # type: ignore[arg-type]
    transaction = SimpleNamespace(entries=entries, reserve_early=lambda rows: None)
    acceptance = SimpleNamespace(drawn_tokens=torch.zeros(10), first_rows=lambda: dict(enumerate(FIRST_ROWS)))
    launched = Launched(
        transaction,  # type: ignore[arg-type]
        [plan, plan],
        Proposal(drafts),
        Observation(entries, observers, NEEDS.taps),  # type: ignore[arg-type]
        SimpleNamespace(hidden={}),  # type: ignore[arg-type]
        acceptance,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
    )
    draft_early(launched, KvMemory(cache, None))  # type: ignore[arg-type]
    return drafter.seen


def test_a_drafter_reads_the_states_of_each_newest_token():
    assert [(one.states_at, one.drawn_at) for one in noted(first_is_on=True)] == [(2, 0), (5 + 3, 5)]


def test_a_drafter_that_was_not_to_draft_for_a_request_does_not_go_on_after_it():
    assert [one.drawn_at for one in noted(first_is_on=False)] == [5]
