"""The step on a pretend target: any draft, any schedule, the same text; any failure, no trace."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from foreword.acceptance.batch import Judgement
from foreword.acceptance.judge import Judging, judge
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.control.fixed import FixedPolicy
from foreword.engine.requests.answer import RequestLimits
from foreword.engine.requests.request import Request
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.draft import ROOT, Draft, stack
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from foreword.speculation.proposing import call_drafters
from foreword.speculation.recovery import Recovery
from foreword.speculation.requests import DraftPlan, PassEntry, ShadowDraft
from foreword.speculation.step import Stepper
from helpers.checked_target import CheckedTarget
from helpers.engines import ask, core_on, run
from helpers.history_target import HistoryTarget
from helpers.saboteur import Saboteur
from helpers.scripted_drafters import RandomTreeDrafter

CONTEXT = 64


def make_request(cache: PagedCache, prompt: Sequence[int], seed: int, eos: int | None = None) -> Request:
    params = SamplingParams(temperature=0.0 if seed % 3 == 0 else 0.9, max_tokens=20)
    limits = RequestLimits(CONTEXT, frozenset() if eos is None else frozenset({eos}))
    sampler = RequestSampler(params, TokenLimits(11), prompt, seed)
    request = Request(seed, prompt, params, sampler, limits)
    request.kv = cache.open()
    return request


def next_token(target: HistoryTarget, history: Sequence[int], request: Request) -> int:
    sampler = RequestSampler(request.params, TokenLimits(11), history, request.sampler.seed)
    logits = target.logits_after(history).unsqueeze(0)
    return int(judge(Judgement.of(logits, stack([Draft()]), [sampler])).target_tokens[0])


def plain_text(target: HistoryTarget, request: Request) -> list[int]:
    """The answer by definition, with no step, cache or batch at all."""
    tokens = list(request.tokens[: request.prompt_len])
    while len(tokens) < request.answer.final_len:
        tokens.append(next_token(target, tokens, request))
        if tokens[-1] in request.answer._limits.stop_ids:
            break
    return tokens[request.prompt_len :]


def run_to_end(stepper: Stepper, requests: Sequence[Request], rng: random.Random) -> None:
    """Random subsets of the requests take part in each pass, prompts in random chunks."""
    while running := [r for r in requests if r.finish_reason is None]:
        chosen = rng.sample(running, rng.randint(1, len(running)))
        stepper.step([PassEntry.of(r, rng.randint(1, len(r.tokens) - r.kv.computed)) for r in chosen])
        assert all(r.kv.computed <= len(r.tokens) for r in requests), "KV of a token that was cut off"


@pytest.mark.parametrize("seed", range(10))
def test_any_draft_and_any_schedule_give_the_plain_text(seed: int):
    rng = random.Random(seed)
    target, cache = HistoryTarget(), PagedCache(60)
    requests = [
        make_request(cache, [rng.randrange(11) for _ in range(rng.randint(1, 40))], seed * 100 + i, eos=3)
        for i in range(5)
    ]
    by_number = {r.request_id: r for r in requests}
    drafter = RandomTreeDrafter(
        lambda h, r: next_token(target, h, by_number[r.request_id]), 11, rng.random(), seed
    )
    stepper = Stepper(target, cache, FixedPolicy(drafter, rng.choice([0, 1, 4, 12, 64])))
    run_to_end(stepper, requests, rng)
    for request in requests:
        assert request.output_ids == plain_text(target, request)
        cache.check_integrity()
        cache.close(request.kv)
    assert cache.pool.num_free == 60


def test_a_perfect_chain_saves_passes():
    target, cache = HistoryTarget(), PagedCache(8)
    request = make_request(cache, [1, 2], seed=1)

    class Perfect(Drafter):
        def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
            return [self._chain(ask) for ask in asks]

        def _chain(self, ask: DraftTask) -> Draft:
            history = list(ask.request.tokens)
            for _ in range(min(ask.max_nodes, ask.max_depth)):
                history.append(next_token(target, history, request))
            return Draft.chain(history[len(ask.request.tokens) :], len(ask.request.tokens))

    stepper = Stepper(target, cache, FixedPolicy(Perfect(), 4))
    while request.finish_reason is None:
        stepper.step([PassEntry.of(request, len(request.tokens) - request.kv.computed)])
    assert target.passes == 4  # 20 tokens, five a pass
    assert request.output_ids == plain_text(target, request)


@pytest.mark.parametrize(
    "draft",
    [
        Draft.chain([5], 99),
        Draft.chain([5], 3, epoch=1),
        Draft.chain([5] * 30, 3),
        Draft.chain([5, 11], 3),
        Draft.chain([-2], 3),
    ],
)
def test_a_stale_oversized_or_nonsensical_draft_is_dropped(draft: Draft):
    target, cache = HistoryTarget(), PagedCache(8)
    request = make_request(cache, [1, 2, 3], seed=1)

    class Stubborn(Drafter):
        def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
            return [draft] * len(asks)

    verdicts = Stepper(target, cache, FixedPolicy(Stubborn(), 8)).step([PassEntry.of(request, 3)]).verdicts
    assert verdicts[0].path == ()
    assert request.output_ids == plain_text(target, request)[:1]


def test_drafters_are_asked_for_no_more_than_fits_the_answer():
    target, cache = HistoryTarget(), PagedCache(8)
    request = make_request(cache, [1, 2, 3], seed=1)
    depths: list[int] = []

    class Listening(Drafter):
        def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
            depths.extend(ask.max_depth for ask in asks)
            return [Draft(committed_len=len(ask.request.tokens)) for ask in asks]

    run_to_end(Stepper(target, cache, FixedPolicy(Listening(), 99)), [request], random.Random(0))
    assert depths == list(range(19, 0, -1))  # 20 tokens of room, one of them always the target's own


def test_one_that_is_asked_aside_is_asked_in_the_same_call_and_changes_nothing():
    class Same(Drafter):
        def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
            return [Draft.chain([4], len(ask.request.tokens), ask.request.epoch) for ask in asks]

        def forget(self, request: DraftRequest) -> None:
            pass

    cache, first, second = PagedCache(8), Same(), Same()
    requests = [make_request(cache, [1, 2, 3], seed=seed) for seed in (1, 2)]
    kept: list[Draft] = []
    looked_at = ShadowDraft(DraftPlan("second", second, 2, 2), kept.append)
    plans = [DraftPlan("first", first, 2, 2, shadow=looked_at), DraftPlan("second", second, 2, 2)]
    entries = [PassEntry.of(request, request.uncomputed) for request in requests]
    proposal = call_drafters(entries, plans, lambda: 0.0)
    assert [(call.method, call.requests) for call in proposal.calls] == [("second", 2), ("first", 1)]
    assert [one.method for one in proposal.shares] == ["first", "second"]
    assert len(kept) == 1
    assert [draft.tokens for draft in (*kept, *proposal.drafts)] == [(4,)] * 3
    assert all(
        second in request.drafter_view.notified.values() for request in requests
    )  # it hears of the end of both


def test_a_shadow_draft_that_is_taken_spares_the_planned_drafters_call():
    """It stays within the planned draft's limits, and its request's share of the call is billed."""

    class Long(Drafter):
        def __init__(self, token: int) -> None:
            self.token, self.asked = token, 0

        def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
            self.asked += len(asks)
            return [Draft.chain([self.token] * 4, len(ask.request.tokens), ask.request.epoch) for ask in asks]

    cache, first, second = PagedCache(8), Long(4), Long(5)
    requests = [make_request(cache, [1, 2, 3], seed=seed) for seed in (1, 2)]
    shadow = DraftPlan("second", second, 4, 4)
    plans = [
        DraftPlan(
            "first", first, 4, depth, shadow=ShadowDraft(shadow, lambda draft, is_taken=is_taken: is_taken)
        )
        for depth, is_taken in ((3, True), (2, False))
    ]
    entries = [PassEntry.of(request, request.uncomputed) for request in requests]
    proposal = call_drafters(entries, plans, lambda: 0.0)
    assert [draft.tokens for draft in proposal.drafts] == [(5, 5, 5), (4, 4)]
    assert [one.method for one in proposal.shares] == ["second", "first"]
    assert (first.asked, second.asked) == (1, 2)
    (again,) = call_drafters(entries[:1], plans[:1], lambda: 0.0).calls
    assert (again.method, first.asked) == ("second", 1)


def test_a_call_counts_the_levels_that_its_nodes_allow():
    """Else what one level costs is learned as the cost of nine."""
    target, cache = HistoryTarget(), PagedCache(8)
    request = make_request(cache, [1, 2, 3], seed=1)
    drafter = RandomTreeDrafter(lambda history, _: 0, 11, 0.0, seed=1)
    stepper = Stepper(target, cache, FixedPolicy(drafter, max_nodes=2, max_depth=9))
    report = stepper.step([PassEntry.of(request, request.uncomputed)])
    assert [call.levels for call in report.calls] == [2]


class PlantedError(Exception):
    pass


@pytest.mark.parametrize("stage", ["plan", "propose", "forward", "begin", "verdicts", "count_kept", "commit"])
def test_a_failure_at_any_stage_is_recovered_from(stage: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever breaks in a step with guesses, the step goes on without them, and the text is the same."""
    rng = random.Random(stage)
    target, cache = HistoryTarget(), PagedCache(30)
    requests = [make_request(cache, [rng.randrange(11) for _ in range(9)], seed=i) for i in range(3)]
    by_number = {r.request_id: r for r in requests}
    drafter = RandomTreeDrafter(lambda h, r: next_token(target, h, by_number[r.request_id]), 11, 0.7, 5)
    policy = FixedPolicy(drafter, 6)
    stepper = Stepper(target, cache, policy)
    recovery = Recovery(stepper)
    judged = {"begin": Judging, "verdicts": Judging}
    owner: Any = {"plan": policy, "propose": drafter, "forward": target, **judged}.get(stage)

    while live := [r for r in requests if r.finish_reason is None]:
        with monkeypatch.context() as broken:
            place = owner or live[0]
            broken.setattr(place, stage, fails_once(getattr(place, stage)))
            report = recovery.resolve(recovery.launch([PassEntry.of(r, r.uncomputed) for r in live]))
        assert all(part.applied for part in report.requests)
        cache.check_integrity()
        if stage == "commit":
            break
    if stage == "commit":  # too late for another try: only this request is lost
        assert [r.finish_reason for r in requests] == ["error", None, None]
        run_to_end(stepper, requests[1:], rng)
        requests.pop(0)
    for request in requests:
        assert request.output_ids == plain_text(target, request)


def fails_once(real: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter([True])

    def call(*args: Any) -> Any:
        if next(calls, False):
            raise PlantedError
        return real(*args)

    return call


def test_a_request_that_breaks_every_pass_fails_alone():
    target, cache = HistoryTarget(), PagedCache(30)
    requests = [make_request(cache, [1, 2, 3 + i], seed=i) for i in range(3)]
    real = target.forward

    def poisoned(batch: ForwardBatch) -> ForwardOutput:
        if 4 in batch.token_ids[batch.positions == 2].tolist():
            raise PlantedError("token 4 at place 2")
        return real(batch)

    target.forward = poisoned  # type: ignore[method-assign]
    stepper = Stepper(target, cache, FixedPolicy())
    recovery = Recovery(stepper)
    recovery.resolve(recovery.launch([PassEntry.of(r, r.uncomputed) for r in requests]))
    assert [r.finish_reason for r in requests] == [None, "error", None]
    assert "token 4 at place 2" in (requests[1].answer.error or "")
    cache.check_integrity()
    run_to_end(stepper, [requests[0], requests[2]], random.Random(0))
    assert requests[0].output_ids == plain_text(target, requests[0])
    assert requests[2].output_ids == plain_text(target, requests[2])


def test_a_verdict_for_a_request_that_is_gone_is_dropped():
    """Cancelled, or preempted and begun anew, while the pass was under way."""
    target, cache = HistoryTarget(), PagedCache(30)
    cancelled, preempted, present = (make_request(cache, [1, 2, 3], seed=i) for i in range(3))
    stepper = Stepper(target, cache, FixedPolicy())
    launched = stepper.launch([PassEntry.of(r, 3) for r in (cancelled, preempted, present)])
    cache.close(cancelled.kv)
    cache.close(preempted.kv)
    preempted.preempt()
    preempted.kv = cache.open()
    report = stepper.resolve(launched)
    assert [part.applied for part in report.requests] == [False, False, True]
    assert (cancelled.output_ids, preempted.output_ids) == ([], [])
    assert preempted.kv.computed == 0
    assert len(present.output_ids) == 1
    cache.check_integrity()
    run_to_end(stepper, [preempted, present], random.Random(0))
    assert preempted.output_ids == plain_text(target, preempted)


def test_launch_commits_nothing_and_an_abandoned_one_can_be_aborted():
    target, cache = HistoryTarget(), PagedCache(8)
    request = make_request(cache, [1, 2, 3], seed=1)
    launched = Stepper(target, cache, FixedPolicy()).launch([PassEntry.of(request, 3)])
    assert request.output_ids == []
    assert request.kv.computed == 0
    launched.transaction.abort()
    launched.transaction.abort()
    assert request.kv.pages == []
    cache.check_integrity()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_branch_where_only_chains_are_exact_costs_its_guesses_and_nobody_elses(rule: str):
    class Branching(Drafter):
        def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
            return [self._draft(ask.request) for ask in asks]

        def _draft(self, request: DraftRequest) -> Draft:
            parents = (ROOT, ROOT) if request.request_id == 0 else (ROOT, 0)
            return Draft((5, 6), parents, len(request.tokens), request.epoch)

        def forget(self, request: DraftRequest) -> None:
            pass

    target: Any = CheckedTarget(Saboteur(random.Random(0), 0.0))
    core = core_on(target, policy=FixedPolicy(Branching(), 4), acceptance_rule=rule)
    requests = [
        ask(core, [1, 2], SamplingParams(seed=seed, max_tokens=8, ignore_eos=True)) for seed in range(3)
    ]
    run(core)
    assert not core.faults
    assert [len(request.acceptance.drafted_per_position) for request in requests] == [1, 2, 2]
