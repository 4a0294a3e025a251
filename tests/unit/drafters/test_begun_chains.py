"""Chains begun behind a pass are for the text that the pass makes, in the pages that it had, and for one ask."""

from collections.abc import Callable

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.transfer import HostCopy
from foreword.drafters.heads.chains import EarlyChain, EarlyChains, join_sources
from foreword.drafters.heads.in_pages import RowRange
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Commit, DraftRequest, DraftTask, InFlight, RequestRows
from helpers.pending_drafts import left_pending
from helpers.pretend_store import PretendStore

TOKENS = list(range(14))


class Begun:
    """A text of 14 tokens, three guesses that a pass judges, and four that were begun behind it."""

    def __init__(self) -> None:
        self.cache = PagedCache(8)
        self.kv = self.cache.open()
        self.cache.reserve(self.kv, 18)
        self.rows = RequestRows(self.kv, self.cache, PretendStore(8, 16))
        (self.judged,) = left_pending([Draft.chain((1, 2, 3), 14)])
        numbers = torch.tensor([50, 51, 52, 53])
        self.source = HostCopy(numbers, numbers)
        self.chains = EarlyChains()
        begun = EarlyChain.of(InFlight(self.ask(TOKENS), self.judged, 0, 0), self.source, range(4))
        self.chains.keep(7, begun)

    def ask(self, tokens: list[int], depth: int = 4) -> DraftTask:
        sampling = RequestSampler(SamplingParams(), TokenLimits(100), tokens, seed=1).drafting()
        return DraftTask(DraftRequest(7, tokens, sampling, epoch=3), depth, depth, self.rows)

    def commit(self, accepted: int, draft: Draft | None = None) -> None:
        tokens = [*TOKENS, *range(accepted + 1)]
        its = self.judged if draft is None else draft
        self.chains.observe([Commit(self.ask(tokens).request, first=13, rows=1 + accepted, draft=its)])

    def taken(self, length: int, depth: int = 4, first: int = 14) -> Draft | None:
        rows = self.kv.rows_of("head", 1)
        run = RowRange(self.rows, rows, TOKENS, first, length, 1)
        return self.chains.take(run, self.ask(list(range(length)), depth))


def test_they_are_asked_for_once_and_as_deep_as_wanted():
    begun = Begun()
    begun.commit(accepted=2)
    found = begun.taken(17, depth=3)
    assert found is not None
    assert (found.tokens, found.committed_len, found.epoch) == ((50, 51, 52), 17, 3)
    assert begun.taken(17) is None


def other_pass(begun: Begun) -> None:
    begun.commit(accepted=2, draft=left_pending([Draft.chain((1, 2, 3), 14)])[0])


def another_pass_behind_it(begun: Begun) -> None:
    begun.commit(accepted=2)
    begun.commit(accepted=2)


def other_pages(begun: Begun) -> None:
    begun.commit(accepted=2)
    begun.kv.pages[1] = 7


def other_sequence(begun: Begun) -> None:
    begun.commit(accepted=2)
    begun.rows = begun.rows._replace(kv=begun.cache.open())
    begun.rows.kv.pages[:] = begun.kv.pages


def ended(begun: Begun) -> None:
    begun.commit(accepted=2)
    begun.chains.forget(7)


@pytest.mark.parametrize(
    "happens",
    [lambda _: None, other_pass, another_pass_behind_it, other_pages, other_sequence, ended],
    ids=["not judged", "other pass", "another behind it", "other pages", "other sequence", "ended"],
)
def test_what_does_not_follow_the_text_is_dropped(happens: Callable[[Begun], None]):
    begun = Begun()
    happens(begun)
    assert begun.taken(17) is None


@pytest.mark.parametrize(("length", "depth", "first"), [(16, 4, 14), (18, 4, 14), (17, 5, 14), (17, 4, 13)])
def test_of_another_length_or_depth_or_with_rows_missing_they_are_dropped(
    length: int, depth: int, first: int
):
    begun = Begun()
    begun.commit(accepted=2)
    assert begun.taken(length, depth, first) is None


def test_a_page_that_only_later_guesses_were_in_may_be_another():
    begun = Begun()
    begun.commit(accepted=0)
    begun.kv.pages[1] = 7
    assert begun.taken(15) is not None


def test_drafts_of_several_sources_become_drafts_of_one():
    one, other = (left_pending([Draft.chain(tokens, 5)])[0] for tokens in ((1, 2), (3, 4, 5)))
    found = join_sources([one, Draft(), other])
    assert [draft.tokens for draft in found] == [(1, 2), (), (3, 4, 5)]
    assert len({id(draft.device.source) for draft in found if draft.device is not None}) == 1
    assert join_sources([one, Draft()]) == [one, Draft()]
