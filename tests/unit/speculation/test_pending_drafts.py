"""Guesses that a device is still making when the pass over them is handed over."""

from collections.abc import Sequence

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.transfer import HostCopy
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.control.fixed import FixedPolicy
from foreword.engine.requests.answer import RequestLimits
from foreword.engine.requests.request import Request
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.draft import ROOT, DeviceTokens, Draft
from foreword.speculation.drafting import DraftTask
from foreword.speculation.proposing import CallShare, Proposal
from foreword.speculation.report import DrafterCall
from foreword.speculation.requests import DraftPlan, PassEntry
from foreword.speculation.step import Stepper
from helpers.history_target import HistoryTarget
from helpers.pending_drafts import left_pending
from helpers.scripted_drafters import RandomTreeDrafter

TREE = Draft((5, 6, 7, 8), (ROOT, 0, ROOT, 2), committed_len=3)


def pending(draft: Draft) -> Draft:
    (found,) = left_pending([draft])
    return found


def unread(draft: Draft) -> bool:
    assert draft.device is not None
    return not draft.device.source.was_read


def test_it_can_be_cut_and_laid_out_without_being_read():
    draft = pending(TREE)
    assert (len(draft), draft.depth, draft.is_chain) == (4, 2, False)
    assert draft.rebase([1, 2, 3]) is draft
    kept, cut = draft.keep(lambda node: node != 1), draft.within(2, 2)
    first = pending(Draft.chain((4, 3, 2), 0)).within(2, 9)
    assert all(map(unread, (draft, kept, cut, first)))
    assert kept.pass_ids == (draft.pass_ids[0], draft.pass_ids[2], draft.pass_ids[3])
    assert (kept.tokens, kept.parents) == ((5, 7, 8), (ROOT, ROOT, 1))
    assert (cut.tokens, first.tokens) == ((5, 6), (4, 3))
    assert draft.on_host() == TREE and draft.on_host().device is None


def test_a_text_that_has_gone_on_reads_it():
    rest = pending(TREE).rebase([1, 2, 3, 7])
    assert (rest.tokens, rest.parents, rest.committed_len) == ((8,), (ROOT,), 4)
    assert pending(Draft.chain((5, 6), 3)).rebase([1, 2, 3, 5]) == Draft.chain((6,), 4)


def test_where_nothing_could_be_drawn_it_says_what_the_pass_has_read():
    assert pending(Draft.chain((5, -1), 0)).tokens == (5, 0)


class PendingDrafter(RandomTreeDrafter):
    """Knows what comes next, most of the time, and hands in what nobody has read yet."""

    def __init__(self, target: HistoryTarget) -> None:
        super().__init__(lambda history, _: int(target.logits_after(history).argmax()), 11, 0.8, 0)
        self.handed_in: list[Draft] = []

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        self.handed_in = left_pending(super().propose(asks))
        return [*self.handed_in]


class WatchedTarget(HistoryTarget):
    """Notes which guesses were read before their pass."""

    def __init__(self) -> None:
        super().__init__()
        self.drafters = [PendingDrafter(self), PendingDrafter(self)]
        self.were_unread: list[list[bool]] = []

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        drafts = [draft for drafter in self.drafters for draft in drafter.handed_in if len(draft)]
        self.were_unread.append([unread(draft) for draft in drafts])
        for drafter in self.drafters:
            drafter.handed_in = []
        return super().forward(batch, store)


def requests_of(cache: PagedCache, *params: SamplingParams) -> list[Request]:
    found = []
    for number, its in enumerate(params):
        sampler = RequestSampler(its, TokenLimits(11), [1 + number, 2, 3], seed=number)
        found.append(Request(number, [1 + number, 2, 3], its, sampler, RequestLimits(64, frozenset())))
        found[-1].kv = cache.open()
    return found


def decode(policy: FixedPolicy, target: HistoryTarget, *params: SamplingParams) -> list[list[int]]:
    cache = PagedCache(60)
    requests, stepper = requests_of(cache, *params), Stepper(target, cache, policy)
    while running := [request for request in requests if request.finish_reason is None]:
        stepper.step(
            [PassEntry.of(request, len(request.tokens) - request.kv.computed) for request in running]
        )
    assert not stepper.faults.counts
    return [request.output_ids for request in requests]


GREEDY = SamplingParams(temperature=0, max_tokens=24)
WARM = SamplingParams(temperature=0.4, max_tokens=24, min_tokens=4, bad_words=())
PENALISED = SamplingParams(temperature=0, max_tokens=24, frequency_penalty=0.4)


@pytest.mark.parametrize("params", [(GREEDY,), (GREEDY, WARM), (WARM, PENALISED, GREEDY)])
def test_they_are_read_after_their_pass_and_the_text_is_the_plain_one(params: tuple[SamplingParams, ...]):
    target = WatchedTarget()
    texts = decode(FixedPolicy(target.drafters[0], 6), target, *params)
    assert texts == decode(FixedPolicy(), HistoryTarget(), *params)
    guessed = [passes for passes in target.were_unread if passes]
    if PENALISED in params:  # what it draws depends on its guesses: they are waited for
        assert any(True not in passes for passes in guessed)
    else:
        assert guessed
        assert all(all(passes) for passes in guessed)
    assert target.passes < sum(map(len, texts)) / 2


def test_a_pass_takes_the_guesses_of_one_source():
    target = WatchedTarget()
    cache = PagedCache(60)
    requests = requests_of(cache, GREEDY, GREEDY)
    for request, drafter in zip(requests, target.drafters, strict=True):
        request.speculation = DraftPlan("pending", drafter, 6, 6)
    stepper = Stepper(target, cache, FixedPolicy())
    while running := [request for request in requests if request.finish_reason is None]:
        stepper.step(
            [PassEntry.of(request, len(request.tokens) - request.kv.computed) for request in running]
        )
    assert [request.output_ids for request in requests] == decode(
        FixedPolicy(), HistoryTarget(), GREEDY, GREEDY
    )
    both = [passes for passes in target.were_unread if len(passes) == 2]
    assert both
    assert all(passes == [True, False] for passes in both)


class Slow(HostCopy):
    """What a device took long for."""

    device_seconds = 0.3  # type: ignore[assignment]


def slow(draft: Draft) -> Slow:
    assert draft.device is not None
    return Slow(draft.device.source.source, draft.device.source.copy)


def test_a_call_took_as_long_as_the_device_did():
    draft = left_pending([Draft.chain((4,), 0)])[0]
    source = slow(draft)
    calls = [DrafterCall("head", 2, 8, 4, 0, seconds=0.1), DrafterCall("head", 1, 4, 4, 0, seconds=0.2)]
    asked = [CallShare("head", 0.05, 0), CallShare(), CallShare("head", 0.05, 0), CallShare("head", 0.2, 1)]
    proposal = Proposal([draft], calls, asked, [source, None]).arrived()
    assert [call.seconds for call in proposal.calls] == pytest.approx([0.3, 0.2])
    assert [who.seconds for who in proposal.shares] == pytest.approx([0.15, 0.0, 0.15, 0.2])


def test_sources_that_were_joined_took_as_long_as_all_of_them_and_are_cold_if_one_is():
    parts = [slow(draft) for draft in left_pending([Draft.chain((4,), 0)]) * 2]
    whole = HostCopy.joined(parts)
    assert (whole.device_seconds, whole.is_cold) == (pytest.approx(0.6), False)
    parts[1].is_cold = True
    assert Draft.on_device(DeviceTokens(HostCopy.joined(parts), (0,)), 1).is_cold
