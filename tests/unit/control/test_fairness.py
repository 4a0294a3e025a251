"""Nobody starves, and guesses take nothing from anyone."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.control.fair_share import FairShare
from foreword.control.fixed import FixedPolicy
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from foreword.speculation.measured.situation import Situation
from foreword.speculation.proposing import fit_to_room
from foreword.speculation.report import DrafterCall, RequestReport, StageSeconds, StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, Verdict
from helpers.engines import ask, core_on, run
from helpers.pretend_store import PRETEND_ROWS
from helpers.requests import lone_request
from helpers.timed_target import TimedTarget

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def small_core(pages: int, policy: FixedPolicy | None = None, **config: Any) -> EngineCore:
    memory = pages * PAGE_SIZE * PRETEND_ROWS.bytes_per_row
    target: Any = TimedTarget()
    return core_on(target, policy=policy, clock=target.clock, kv_cache_memory_bytes=memory, **config)


class Liar(Drafter):
    """As many guesses as it may make, all of them wrong."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        self.asked += [ask.max_nodes for ask in asks]
        return [self._wrong(ask) for ask in asks]

    def _wrong(self, ask: DraftTask) -> Draft:
        # Token 12 is banned in these requests: no guess is ever accepted.
        tokens = [12] * min(ask.max_nodes, ask.max_depth)
        return Draft.chain(tokens, len(ask.request.tokens), ask.request.epoch)

    def forget(self, request: DraftRequest) -> None:
        pass


@pytest.mark.parametrize("pages", [8, 40])
@pytest.mark.parametrize("max_rows", [5, 16])
def test_a_stream_of_short_requests_cannot_keep_a_long_prompt_from_its_end(pages: int, max_rows: int):
    core = small_core(pages, max_num_batched_tokens=max_rows, max_num_seqs=4)
    rng = random.Random(pages)

    def short() -> None:
        ask(core, [rng.randrange(12) for _ in range(9)], SamplingParams(max_tokens=6, seed=1, **GREEDY))

    for _ in range(6):
        short()
    long = ask(core, [rng.randrange(12) for _ in range(70)], SamplingParams(max_tokens=20, seed=1, **GREEDY))
    for _ in range(250):
        while len(core.scheduler.waiting) < 4:
            short()
        core.step()
    assert long.finish_reason == "length"


def test_the_oldest_request_is_never_put_off():
    """Requests outgrow the pages that they were let in with: the newest make way."""
    core = small_core(8, max_num_batched_tokens=16, max_num_seqs=5)
    rng = random.Random(1)
    params = SamplingParams(max_tokens=50, seed=1, **GREEDY)
    requests = [ask(core, [rng.randrange(12) for _ in range(rng.randint(1, 30))], params) for _ in range(12)]
    while core.has_requests:
        oldest = next(request for request in requests if request.finish_reason is None)
        before = len(oldest.tokens) + oldest.kv.computed
        core.step()
        assert len(oldest.tokens) + oldest.kv.computed > before or oldest.finish_reason is not None
        running = [request.request_id for request in core.scheduler.running]
        assert running == sorted(running)
    assert core.stats().preemptions > 0
    assert requests[0].accounting.preemptions == 0


def test_requests_wait_by_arrival_whoever_queues_them_first():
    core = small_core(8, max_num_seqs=1)
    new = [NewRequest(f"request-{i}", (1, 2), SamplingParams(max_tokens=2, n=2, **GREEDY)) for i in range(3)]
    prepared = [core.prepare(request) for request in new]
    for requests in reversed(prepared):
        core.enqueue(requests)
    assert [request.request_id for request in core.scheduler.waiting] == list(range(6))
    run(core)


def test_a_prompt_longer_than_the_row_budget_does_not_stop_those_who_decode():
    core = small_core(40, max_num_batched_tokens=6, max_num_seqs=4)
    decoding = ask(core, [1], SamplingParams(max_tokens=20, seed=1, **GREEDY))
    core.step()
    ask(core, list(range(12)) * 6, SamplingParams(max_tokens=1, seed=1, **GREEDY))
    for count in range(2, 10):
        core.step()
        assert len(decoding.output_ids) == count


def trace(core: EngineCore, requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    """After every step: what was committed, preempted, found, and is still cached."""
    seen = []
    while core.has_requests:
        core.step()
        stats, cache = core.stats(), core.cache
        idle = cache.available_pages - cache.free_pages
        texts = tuple(tuple(request.tokens) for request in requests)
        seen.append((texts, stats.preemptions, stats.prefix_hits, idle))
    return seen


@pytest.mark.parametrize("seed", range(2))
def test_wrong_guesses_change_neither_preemptions_nor_what_is_cached(seed: int):
    def world(policy: FixedPolicy) -> tuple[EngineCore, list[Request]]:
        rng = random.Random(seed)
        core = small_core(rng.randint(6, 14), policy, max_num_seqs=6, max_draft_share=1e9)
        prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 50))] for _ in range(3)]
        params = SamplingParams(max_tokens=30, seed=seed, logit_bias={12: -100.0}, ignore_eos=True)
        chosen = [prompts[rng.randrange(3)] + [rng.randrange(12) for _ in range(4)] for _ in range(12)]
        return core, [ask(core, prompt, params) for prompt in chosen]

    liar = Liar()
    with_guesses = trace(*world(FixedPolicy(liar, 40)))
    assert with_guesses == trace(*world(FixedPolicy()))
    assert with_guesses[-1][1] > 0 or seed > 0, "no preemption: the world is too roomy"
    assert max(liar.asked) > 0
    assert min(liar.asked) < 40


def test_a_guess_takes_no_page_that_is_cached_or_wanted():
    """Two pages are free or cached: the committed token takes what it needs, a draft only what is free."""
    cache = PagedCache(3, prefix_caching=True)
    old = cache.open("", range(17))
    cache.reserve(old, 16)
    cache.commit(old, 16, ())
    cache.publish(old, list(range(16)))
    cache.close(old)  # one idle page
    core = small_core(4)
    request = ask(core, list(range(12)), SamplingParams(max_tokens=40, seed=1, **GREEDY))
    request.kv = cache.open()
    cache.reserve(request.kv, 12)
    entries = [PassEntry.of(request, 12)]

    def guesses(max_rows: int | None = None) -> int:
        (plan,) = fit_to_room(entries, [DraftPlan("liar", Liar(), 60, 60)], cache, max_rows)
        return 0 if plan is None else plan.max_nodes

    assert guesses() == 4 + PAGE_SIZE  # the rest of its page and the one free page
    assert cache.matching_pages("", range(17)) == 1
    taken = cache.open()
    cache.reserve(taken, 16)
    assert guesses() == 4
    assert guesses(max_rows=14) == 2
    assert guesses(max_rows=12) == 0


class Late(Drafter):
    """Hands in every draft one call too late."""

    def __init__(self) -> None:
        self._before: list[Draft] = []

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        now = [Draft.chain([1], len(ask.request.tokens), ask.request.epoch) for ask in asks]
        before, self._before = self._before, now
        return before or [Draft()] * len(asks)

    def forget(self, request: DraftRequest) -> None:
        pass


def test_a_draft_from_before_a_preemption_is_not_judged():
    """Preempted during its first pass, a request has the same tokens again, but not the same state."""
    core = small_core(8, FixedPolicy(Late(), 4))
    request = ask(core, [1, 2, 3], SamplingParams(max_tokens=8, seed=1, **GREEDY))
    under_way = core.launch()
    assert under_way is not None
    core.scheduler.preempt(request)
    assert core.resolve(under_way) == []
    core.step()
    assert len(request.output_ids) == 1
    assert request.acceptance.drafted == 0
    run(core)
    assert request.finish_reason == "length"


class GivenPlan(FixedPolicy):
    def __init__(self, wanted: Sequence[int]) -> None:
        super().__init__()
        self._given = [DraftPlan("liar", Liar(), nodes, nodes) if nodes else None for nodes in wanted]

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        return self._given


def measured(situation: Situation, rows: int, seconds: float, calls: Sequence[DrafterCall] = ()) -> None:
    """A step of so many rows that took so long."""
    part = RequestReport(lone_request([1]), Verdict(draft=Draft.chain([1] * (rows - 1), 0)), run=1)
    situation.costs.observe(StepReport([part], calls, StageSeconds(total=seconds)))


def guesses_of(plans: Sequence[DraftPlan | None]) -> list[int]:
    return [0 if plan is None else plan.max_nodes for plan in plans]


@pytest.mark.parametrize("seed", range(100))
def test_guesses_lengthen_a_mixed_step_by_no_more_than_their_share(seed: int):
    rng = random.Random(seed)
    situation = Situation()
    for _ in range(rng.randint(1, 40)):
        rows = rng.randint(1, 300)
        measured(situation, rows, rng.uniform(0.5, 2) * (rows + 20) * 1e-4)
    call = DrafterCall("liar", 1, 10, 10, 0, rng.choice((0.0, 1e-4, 1e-2)))
    measured(situation, 1, 20e-4, [call])
    wanted = [0, *(rng.choice((0, 3, 20, 60)) for _ in range(rng.randint(1, 8)))]
    runs = [rng.choice((1, 1, 30)) for _ in wanted]
    entries = [PassEntry.of(lone_request([1] * run), run) for run in runs]
    share = rng.choice((0.0, 0.1, 0.5, 2.0))
    guesses = guesses_of(FairShare(GivenPlan(wanted), share).plan(entries, situation))
    rows = sum(entry.run for entry in entries)
    assert all(0 <= got <= asked for got, asked in zip(guesses, wanted, strict=True))
    if sum(guesses):
        costs = situation.costs
        plain, longer = costs.step_seconds(rows), costs.step_seconds(rows + sum(guesses))
        assert plain is not None
        assert longer is not None
        assert longer + costs.draft_seconds("liar", max(guesses)) <= (1 + share) * plain * (1 + 1e-9)


def mixed_run(share: float, steps: int, call: float) -> tuple[list[int], list[float]]:
    """Guesses of every step, and what they added to it, where a row costs a tenth of a step."""
    situation = Situation()
    for rows in (1, 2, 3, 4, 6, 8, 16):
        situation.costs.begin_with(0, [(rows, (9 + rows) * 1e-3)])
    for levels in (1, 2, 3, 4) * 3:
        measured(situation, 1, 10e-3, [DrafterCall("liar", 1, levels, levels, 0, call)])
    fair = FairShare(GivenPlan([0, 2]), share)
    entries = [PassEntry.of(lone_request([1]), 1) for _ in range(2)]
    guesses, added = [], []
    for _ in range(steps):
        (count,) = guesses_of(fair.plan(entries, situation))[1:]
        guesses.append(count)
        added.append(count * 1e-3 + (call if count else 0.0))
        parts = [RequestReport(entry.request, Verdict(draft=Draft()), run=1) for entry in entries]
        calls = [DrafterCall("liar", 1, count, count, 0, call)] if count else []
        fair.learn(StepReport(parts, calls, StageSeconds(total=11e-3 + added[-1])))
    return guesses, added


def test_a_share_that_is_too_small_for_one_step_is_saved_for_another():
    """Guesses that lengthen a step by a quarter are made in every fifth step or so, as they were wanted."""
    guesses, added = mixed_run(0.05, 400, call=0.8e-3)
    assert set(guesses) == {0, 2}
    assert 60 <= guesses.count(2) <= 85
    assert sum(added) <= 0.05 * 400 * 11e-3 * 1.01
    assert max(added) <= 0.5 * 11e-3


def test_what_no_saving_could_pay_for_is_not_done():
    guesses, _ = mixed_run(0.05, 100, call=6e-3)
    assert set(guesses) == {0}


def test_steps_that_took_longer_than_expected_are_paid_for():
    situation = Situation()
    situation.costs.begin_with(0, [(rows, 10e-3) for rows in (1, 2, 3, 4, 8)])
    fair = FairShare(GivenPlan([0, 2]), 0.1)
    entries = [PassEntry.of(lone_request([1]), 1) for _ in range(2)]
    parts = [RequestReport(entry.request, Verdict(draft=Draft()), run=1) for entry in entries]
    assert guesses_of(fair.plan(entries, situation)) == [0, 2]  # rows are free, they say
    fair.learn(StepReport(parts, [DrafterCall("liar", 1, 2, 2, 0, 0.0)], StageSeconds(total=15e-3)))
    waits = 0
    while not sum(guesses_of(fair.plan(entries, situation))):
        waits += 1
        fair.learn(StepReport(parts, [], StageSeconds(total=10e-3)))
    assert 3 <= waits <= 4  # the step was 5 ms longer: four shares, besides its own, and the next brings one


@pytest.mark.parametrize(
    ("share", "limit", "allowed"), [(0.5, None, 20), (0.5, 52.5e-3, 4), (0.5, 47e-3, 0), (0.05, None, 2)]
)
def test_a_step_that_reads_prompts_has_its_own_share_within_the_limit_of_its_requests(
    share: float, limit: float | None, allowed: int
):
    """Rows cost 1 ms and a step 5 ms, so 43 rows take 48 ms."""
    situation = Situation()
    situation.costs.begin_with(0, [(rows, (5 + rows) * 1e-3) for rows in (1, 2, 8, 16, 32, 64, 128)])
    reading, plain, decoding = lone_request([1] * 41), lone_request([1]), lone_request([1])
    plain.step_limit = limit
    entries = [PassEntry.of(reading, 41), PassEntry.of(plain, 1), PassEntry.of(decoding, 1)]
    plans = FairShare(GivenPlan([0, 0, 20]), share).plan(entries, situation)
    assert guesses_of(plans) == [0, 0, allowed]


def test_a_step_in_which_everyone_speculates_is_not_cut():
    situation = Situation()
    measured(situation, 1, 0.01)
    entries = [PassEntry.of(lone_request([1]), 1) for _ in range(2)]
    plans = FairShare(GivenPlan([60, 20]), 0.0).plan(entries, situation)
    assert guesses_of(plans) == [60, 20]


def test_a_plan_for_a_prompt_that_is_still_being_read_costs_nothing_and_stays():
    """Nobody guesses for it in this step, but a head that is meant to guess behind it reads along."""
    situation = Situation()
    measured(situation, 1, 0.01)
    reading, plain, decoding = lone_request([1] * 40), lone_request([1]), lone_request([1])
    entries = [PassEntry.of(reading, 30), PassEntry.of(plain, 1), PassEntry.of(decoding, 1)]
    plans = FairShare(GivenPlan([60, 0, 20]), 0.0).plan(entries, situation)
    assert guesses_of(plans) == [60, 0, 0]


def test_a_plan_for_few_requests_is_dropped_when_there_are_many():
    policy = FixedPolicy()
    requests = [lone_request([1]) for _ in range(3)]
    for request in requests:
        request.speculation = DraftPlan("liar", Liar(), 5, 5, max_batch=2)
    entries = [PassEntry.of(request, 1) for request in requests]
    assert guesses_of(policy.plan(entries[:1], Situation())) == [5]
    assert guesses_of(policy.plan(entries[:2], Situation())) == [0, 0]
    assert policy.rows_wanted(requests[:1], Situation()) == 0


def test_a_plain_request_beside_speculating_ones_is_not_slowed_down_by_their_guesses():
    """The engine cuts guesses by itself once it has measured what they cost."""
    core = small_core(20, FixedPolicy(), max_draft_share=0.0)
    liar = Liar()
    speculating = ask(core, [1, 2], SamplingParams(max_tokens=12, seed=1, **GREEDY))
    speculating.speculation = DraftPlan("liar", liar, 20, 20)
    core.step()
    asked = len(liar.asked)
    plain = ask(core, [3, 4], SamplingParams(max_tokens=4, seed=1, **GREEDY))
    while plain.finish_reason is None:
        core.step()
    assert len(liar.asked) == asked
    run(core)
    assert len(liar.asked) > asked


class BadPolicy(FixedPolicy):
    def __init__(self, wanted: int | None) -> None:
        super().__init__()
        self._wanted = wanted

    def rows_wanted(self, requests: Any, situation: Situation, beside: int = 1) -> int:
        if self._wanted is None:
            raise RuntimeError("planted")
        return self._wanted


@pytest.mark.parametrize("wanted", [None, -100])
def test_a_policy_that_fails_about_rows_costs_guesses_alone(wanted: int | None):
    core = small_core(40, BadPolicy(wanted), max_num_batched_tokens=16, max_num_seqs=4)
    decoding = ask(core, [1], SamplingParams(max_tokens=20, seed=1, **GREEDY))
    core.step()
    ask(core, list(range(12)) * 5, SamplingParams(max_tokens=1, seed=1, **GREEDY))
    for count in range(2, 7):
        core.step()
        assert len(decoding.output_ids) == count
    assert core.target.most_rows <= 16
