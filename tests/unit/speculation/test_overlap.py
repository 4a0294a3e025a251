"""Steps under way at once, and what drafters are told of the passes."""

import random
from collections import deque
from collections.abc import Sequence

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.batch import ForwardBatch, ForwardOutput, Tap
from foreword.control.fixed import FixedPolicy
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import (
    NO_NEEDS,
    Commit,
    Drafter,
    DrafterNeeds,
    DraftRequest,
    DraftTask,
    Traits,
)
from foreword.speculation.measured.situation import Situation
from foreword.speculation.requests import DraftPlan, PassEntry
from foreword.speculation.step import Stepper
from helpers.clocks import ScriptedClock
from helpers.history_target import HistoryTarget
from helpers.requests import lone_request

VOCAB = 11


def started(cache: PagedCache, prompt: Sequence[int], params: SamplingParams | None = None):
    request = lone_request(prompt, params or SamplingParams(temperature=0, max_tokens=1000), VOCAB)
    request.kv = cache.open("", prompt)
    return request


def entry(request) -> PassEntry:
    return PassEntry.of(request, request.uncomputed)


def plain_text(prompt: Sequence[int], count: int, params: SamplingParams | None = None) -> list[int]:
    cache = PagedCache(8)
    request = started(cache, prompt, params)
    stepper = Stepper(HistoryTarget(), cache, FixedPolicy())
    while len(request.output_ids) < count:
        stepper.step([entry(request)])
    return request.output_ids


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=1000),
        SamplingParams(max_tokens=1000),
        SamplingParams(max_tokens=1000, top_k=4),
        SamplingParams(max_tokens=1000, min_tokens=6, stop_token_ids=tuple(range(0, VOCAB, 2))),
    ],
)
def test_a_step_that_is_launched_before_its_token_is_known_gives_the_same_text(params: SamplingParams):
    cache = PagedCache(8)
    requests = [started(cache, prompt, params) for prompt in ([1, 2, 3], [4, 5])]
    stepper = Stepper(HistoryTarget(), cache, FixedPolicy())
    under_way = deque([stepper.launch([entry(request) for request in requests])])
    for _ in range(30):
        under_way.append(stepper.launch([entry(request) for request in requests]))
        stepper.resolve(under_way.popleft())
        cache.check_integrity()
    for request, prompt in zip(requests, ([1, 2, 3], [4, 5]), strict=True):
        assert len(request.output_ids) == 30
        assert request.output_ids == plain_text(prompt, 30, params)


def test_a_chunk_that_follows_another_is_plain():
    """Guesses of a pass that follows one under way would be lost when that one is committed."""
    cache, prompt = PagedCache(8), [1, 2, 3, 4]
    request = started(cache, prompt)
    truth = plain_text(prompt, 4)

    class Knowing(Drafter):
        def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
            return [Draft.chain(truth[: ask.max_nodes], len(ask.request.tokens)) for ask in asks]

        def forget(self, request: DraftRequest) -> None:
            """Nothing is kept."""

    stepper = Stepper(HistoryTarget(), cache, FixedPolicy(Knowing(), 3))
    launched = [stepper.launch([PassEntry.of(request, 2)]) for _ in range(2)]
    for one in launched:
        assert [part.applied for part in stepper.resolve(one).requests] == [True]
        cache.check_integrity()
    assert request.output_ids == truth[:1]
    assert request.answer.error is None


def test_a_third_step_for_the_same_request_is_refused_and_the_others_go_on():
    cache = PagedCache(8)
    request = started(cache, [1, 2, 3])
    stepper = Stepper(HistoryTarget(), cache, FixedPolicy())
    launched = [stepper.launch([entry(request)]) for _ in range(2)]
    with pytest.raises(AssertionError, match="depends on a pass in flight"):
        stepper.launch([entry(request)])
    for one in launched:
        stepper.resolve(one)
    assert request.output_ids == plain_text([1, 2, 3], 2)


def test_a_step_with_guesses_is_followed_by_none_for_the_same_request():
    """How many of its rows are final is found out by the pass itself."""
    cache = PagedCache(8)
    request = started(cache, [1, 2, 3])
    drafter = Observer(NO_NEEDS)
    (drafter.truth[request.request_id],) = plain_texts([[1, 2, 3]], 8)
    target = HistoryTarget()
    Stepper(target, cache, FixedPolicy()).step([entry(request)])
    stepper = Stepper(target, cache, FixedPolicy(drafter, 4, 2))
    guessing = stepper.launch([entry(request)])
    with pytest.raises(AssertionError, match="depends on a pass in flight"):
        stepper.launch([entry(request)])
    assert len(stepper.resolve(guessing).requests[0].draft)
    assert request.output_ids == plain_text([1, 2, 3], len(request.output_ids))


def test_books_that_fail_cost_no_token_and_no_lesson(monkeypatch: pytest.MonkeyPatch):
    cache = PagedCache(8)
    request = started(cache, [1, 2, 3])
    policy, situation = FixedPolicy(), Situation()
    heard: list[int] = []
    monkeypatch.setattr(policy, "learn", lambda report: heard.append(len(report.requests)))

    def fail(report: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(situation, "learn", fail)
    stepper = Stepper(HistoryTarget(), cache, policy, situation=situation)
    for _ in range(3):
        stepper.step([entry(request)])
    assert request.output_ids == plain_text([1, 2, 3], 3)
    assert heard == [1] * 3
    assert stepper.faults.counts["books"] == 3


def test_a_step_that_fails_takes_the_one_after_it_with_it():
    """But not what others have in it."""
    cache = PagedCache(8)
    request, beside = started(cache, [1, 2, 3]), started(cache, [6, 7])
    stepper = Stepper(HistoryTarget(), cache, FixedPolicy())
    stepper.step([entry(request)])
    first = stepper.launch([entry(request)])
    second = stepper.launch([entry(request), entry(beside)])
    first.transaction.abort()
    report = stepper.resolve(second)
    cache.check_integrity()
    assert [part.applied for part in report.requests] == [False, True]
    stepper.step([entry(request)])
    assert request.output_ids == plain_text([1, 2, 3], 2)
    assert beside.output_ids == plain_text([6, 7], 1)


def test_a_step_that_was_lost_with_another_takes_nothing_of_what_came_after():
    cache = PagedCache(8)
    request = started(cache, [1, 2, 3])
    stepper = Stepper(HistoryTarget(), cache, FixedPolicy())
    stepper.step([entry(request)])
    first, second = (stepper.launch([entry(request)]) for _ in range(2))
    first.transaction.abort()
    third = stepper.launch([entry(request)])
    second.transaction.abort()
    assert (request.kv.passes, request.kv.certain_rows) == (1, 1)
    assert [part.applied for part in stepper.resolve(third).requests] == [True]
    assert request.output_ids == plain_text([1, 2, 3], 2)
    cache.check_integrity()


def test_a_request_that_has_ended_takes_nothing_of_the_step_under_way_for_it():
    cache = PagedCache(8, prefix_caching=True)
    request = started(cache, list(range(11)) + [1] * 4)
    stepper = Stepper(HistoryTarget(), cache, FixedPolicy())
    launched = [stepper.launch([entry(request)]) for _ in range(2)]
    stepper.resolve(launched[0])
    text = list(request.tokens)
    cache.close(request.kv)
    assert [part.applied for part in stepper.resolve(launched[1]).requests] == [False]
    assert request.tokens == text
    assert cache.available_pages == 8
    cache.check_integrity()


def test_two_steps_for_different_requests_are_both_right():
    def texts(overlap: bool) -> list[list[int]]:
        target, cache, rng = HistoryTarget(), PagedCache(20), random.Random(3)
        stepper = Stepper(target, cache, FixedPolicy())
        requests = [started(cache, [rng.randrange(VOCAB) for _ in range(9)]) for _ in range(2)]
        for _ in range(12):
            if overlap:
                launched = [stepper.launch([entry(request)]) for request in requests]
                for one in launched:
                    stepper.resolve(one)
            else:
                stepper.step([entry(request) for request in requests])
        return [request.output_ids for request in requests]

    assert texts(overlap=True) == texts(overlap=False)


def test_the_time_of_steps_that_overlap_is_counted_once():
    clock = ScriptedClock()

    class Slow(HistoryTarget):
        def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
            clock.pass_by(3.0)
            return super().forward(batch, store)

    cache = PagedCache(20)
    stepper = Stepper(Slow(), cache, FixedPolicy(), clock=clock)
    launched = []
    for prompt in ([1, 2], [3, 4]):
        launched.append(stepper.launch([entry(started(cache, prompt))]))
        clock.pass_by(5.0)  # whatever the host does between the halves of steps is none of theirs
    reports = [stepper.resolve(one) for one in launched]
    assert [report.seconds.total for report in reports] == [3.0, 3.0]
    assert [report.seconds.verify for report in reports] == [3.0, 3.0]


TAPS = (Tap(2), Tap(5, normed=True))


class TappedTarget(HistoryTarget):
    """Its hidden state at a row is (tap's layer, position, token)."""

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        output = super().forward(batch, store)
        rows = batch.hidden_rows.long()
        hidden = {
            tap: torch.stack(
                [torch.full((len(rows),), tap.layer), batch.positions[rows], batch.token_ids[rows]], dim=1
            )
            for tap in batch.taps
        }
        return ForwardOutput(output.logits, hidden)


class Observer(Drafter):
    """Guesses trees of which one node in two is right, and writes down what it is told."""

    def __init__(self, needs: DrafterNeeds) -> None:
        self.traits = Traits(needs=needs)
        self.told: list[Commit] = []
        self._rng = random.Random(0)
        self.truth: dict[int, list[int]] = {}

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftTask) -> Draft:
        truth = self.truth[ask.request.request_id][len(ask.request.tokens) :][: ask.max_depth]
        tokens, parents, above = [], [], -1
        for token in truth:
            level = [token, (token + 1) % VOCAB]
            self._rng.shuffle(level)
            here = len(tokens) + level.index(token)
            tokens += level
            parents += [above, above]
            above = here
        return Draft(tuple(tokens), tuple(parents), len(ask.request.tokens), ask.request.epoch)

    def observe(self, commits: Sequence[Commit]) -> None:
        self.told += commits

    def forget(self, request: DraftRequest) -> None:
        pass


def plain_texts(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    cache = PagedCache(40)
    requests = [started(cache, prompt) for prompt in prompts]
    stepper = Stepper(HistoryTarget(), cache, FixedPolicy())
    for _ in range(tokens):
        stepper.step([entry(request) for request in requests])
    return [list(request.tokens) for request in requests]


@pytest.mark.parametrize("chunk", [3, 64])
def test_a_drafter_hears_every_committed_row_once_with_its_states(chunk: int):
    """Prompt chunks, accepted paths of trees and corrections alike; beside a request that nobody watches."""
    prompts = [[1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4]]
    truths = plain_texts(prompts, 30)
    cache, observer = PagedCache(40), Observer(DrafterNeeds(TAPS, draws=True))
    stepper = Stepper(TappedTarget(), cache, FixedPolicy())
    unwatched, watched = (started(cache, prompt) for prompt in prompts)
    watched.speculation = DraftPlan("observer", observer, 8, 4)
    observer.truth[watched.request_id] = truths[1]
    while len(watched.output_ids) < 20:
        entries = [PassEntry.of(r, min(r.uncomputed, chunk)) for r in (unwatched, watched)]
        stepper.step(entries)
    assert watched.tokens == truths[1][: len(watched.tokens)]
    position = 0
    for commit in observer.told:
        assert commit.request.request_id == watched.request_id
        assert commit.first == position
        places = list(range(position, position + commit.rows))
        for tap in TAPS:
            expected = [[tap.layer, place, watched.tokens[place]] for place in places]
            assert commit.hidden[tap].tolist() == expected
        position += commit.rows
        if len(commit.draft):
            assert len(commit.draws) == 1 + len(commit.draft)
            committed = len(commit.request.tokens) - commit.draft.committed_len
            assert commit.draws[0] == watched.tokens[commit.draft.committed_len]
            run = commit.draft.committed_len - commit.first
            assert commit.rows == run + committed - 1  # the newest token has no row yet
    assert position == watched.kv.computed
    assert any(len(commit.draft) and commit.rows > 2 for commit in observer.told), "no path was accepted"


def test_two_watched_requests_hear_of_their_own_rows():
    prompts = [[1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4]]
    truths = plain_texts(prompts, 30)
    cache, observer = PagedCache(40), Observer(DrafterNeeds(TAPS))
    stepper = Stepper(TappedTarget(), cache, FixedPolicy())
    requests = [started(cache, prompt) for prompt in prompts]
    for request, truth in zip(requests, truths, strict=True):
        request.speculation = DraftPlan("observer", observer, 6, 3)
        observer.truth[request.request_id] = truth
    for _ in range(6):
        stepper.step([entry(request) for request in requests])
    by_number = {request.request_id: request for request in requests}
    for commit in observer.told:
        tokens = by_number[commit.request.request_id].tokens
        heard = [(place, token) for _, place, token in commit.hidden[TAPS[0]].tolist()]
        places = range(commit.first, commit.first + commit.rows)
        assert heard == [(place, tokens[place]) for place in places]
    assert len(observer.told) == 12


def test_a_drafter_that_needs_nothing_costs_no_hidden_states():
    cache, target = PagedCache(8), TappedTarget()
    request = started(cache, [1, 2, 3])
    observer = Observer(DrafterNeeds())
    observer.truth[request.request_id] = []
    request.speculation = DraftPlan("observer", observer, 2, 2)
    Stepper(target, cache, FixedPolicy()).step([entry(request)])
    assert observer.told == []


def test_an_observer_that_fails_costs_nobody_anything(caplog: pytest.LogCaptureFixture):
    class Failing(Observer):
        def observe(self, commits: Sequence[Commit]) -> None:
            raise RuntimeError("planted")

    cache = PagedCache(8)
    request = started(cache, [1, 2, 3])
    drafter = Failing(DrafterNeeds(TAPS))
    drafter.truth[request.request_id] = []
    request.speculation = DraftPlan("failing", drafter, 2, 2)
    stepper = Stepper(TappedTarget(), cache, FixedPolicy())
    for _ in range(3):
        stepper.step([entry(request)])
    assert len(request.output_ids) == 3
    assert stepper.faults.counts == {"observe": 3}


def watching(cache: PagedCache, target: HistoryTarget):
    request = started(cache, [1, 2, 3])
    observer = Observer(DrafterNeeds(TAPS))
    observer.truth[request.request_id] = []
    request.speculation = DraftPlan("observer", observer, 2, 2)
    return request, observer, Stepper(target, cache, FixedPolicy())


def test_a_drafter_that_was_told_of_a_request_hears_of_its_end():
    """Though it was never asked: guessing is switched off."""
    request, observer, stepper = watching(PagedCache(8), TappedTarget())
    stepper.situation.speculating = False
    stepper.step([entry(request)])
    assert len(observer.told) == 1
    assert list(request.drafter_view.notified.values()) == [observer]


def test_rows_of_a_request_that_is_gone_are_told_to_nobody():
    cache = PagedCache(8)
    request, observer, stepper = watching(cache, TappedTarget())
    launched = stepper.launch([entry(request)])
    cache.close(request.kv)
    stepper.resolve(launched)
    assert observer.told == []


class PoisonedTarget(HistoryTarget):
    """NaN logits in one pass."""

    poisoned = False

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        output = super().forward(batch, store)
        if self.poisoned and len(output.logits):
            output.logits.fill_(torch.nan)
        return output


def test_pages_of_a_request_that_failed_with_nan_are_never_found_again():
    """Also those that were published before the failure showed: a chunk's rows may have been bad all along."""
    target, cache = PoisonedTarget(), PagedCache(20, prefix_caching=True)
    prompt = [place % VOCAB for place in range(3 * PAGE_SIZE + 2)]
    stepper = Stepper(target, cache, FixedPolicy())
    bad = started(cache, prompt)
    stepper.step([PassEntry.of(bad, 2 * PAGE_SIZE)])
    assert cache.matching_pages("", prompt) == 2
    target.poisoned = True
    stepper.step([entry(bad)])
    assert bad.finish_reason == "error"
    assert cache.matching_pages("", prompt) == 0
    cache.close(bad.kv)
    cache.check_integrity()
    target.poisoned = False
    good = started(cache, prompt)
    assert good.kv.computed == 0
    stepper.step([entry(good)])
    assert good.finish_reason is None
    assert cache.matching_pages("", prompt) == 3


def test_rows_without_numbers_are_told_to_nobody():
    class Poisoned(TappedTarget):
        def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
            output = super().forward(batch, store)
            output.logits.fill_(torch.nan)
            return output

    request, observer, stepper = watching(PagedCache(8), Poisoned())
    stepper.step([entry(request)])
    assert request.finish_reason == "error"
    assert observer.told == []
