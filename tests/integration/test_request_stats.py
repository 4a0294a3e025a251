"""What is told about a request's cost adds up."""

from dataclasses import replace

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest, RequestStats
from foreword.engine.requests.accounting import Accounting
from foreword.engine.text import Vocabulary
from foreword.proofs.passes import tiny_decoder
from foreword.proofs.statistics import DrawingDrafter
from foreword.speculation.report import RequestReport, StepReport
from foreword.speculation.requests import DraftPlan, Verdict
from helpers.engines import core_on
from helpers.requests import lone_request

VOCAB = 40
PROMPT = tuple((5 * i + 1) % VOCAB for i in range(35))
PARAMS = SamplingParams(seed=9, max_tokens=15, ignore_eos=True)


def engine(drafting: bool = True, **config: object) -> EngineCore:
    sizes = {"kv_cache_memory_bytes": 1 << 20} | config
    policy = FixedPolicy(DrawingDrafter(VOCAB, 4), 4) if drafting else None
    return core_on(tiny_decoder(VOCAB, 3), end_ids=[7], policy=policy, **sizes)


def finish(core: EngineCore) -> dict[str, RequestStats]:
    """Step until all have ended; statistics come with the last delta of an answer and not before."""
    found = {}
    while core.has_requests:
        for delta in core.step():
            assert (delta.stats is None) == (delta.finish_reason is None)
            if delta.stats is not None:
                found[f"{delta.request_id}/{delta.index}"] = delta.stats
    return found


def ask(core: EngineCore, name: str, prompt: tuple[int, ...] = PROMPT, **more: object) -> None:
    core.add(NewRequest(name, prompt, replace(PARAMS, **more)))  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 11}, {"max_num_seqs": 2}], ids=str)
def test_parts_of_the_time_add_up_to_the_engines(config: dict):
    core = engine(**config)
    for i in range(5):
        ask(core, f"r{i}", PROMPT[: 3 + 7 * i], seed=i, n=1 + i % 2)
    found = finish(core).values()
    totals = core.stats()
    for part in ("draft_seconds", "verify_seconds", "accept_seconds"):
        assert sum(getattr(stats, part) for stats in found) == pytest.approx(getattr(totals, part))
        assert all(getattr(stats, part) > 0 for stats in found)
    assert totals.draft_seconds + totals.verify_seconds + totals.accept_seconds <= totals.step_seconds
    assert max(stats.passes for stats in found) <= totals.steps
    drafts = [sum(getattr(stats, name) for stats in found) for name in ("drafts", "drafted", "accepted")]
    assert tuple(drafts) == totals.acceptance["given/sampled"]
    assert set(totals.cohorts) == {"given/sampled", "plain/sampled"}
    for one, of_answers in {"passes": "passes", "asks": "asks", "tokens": "output_tokens"}.items():
        by_cohort = sum(getattr(cohort, one) for cohort in totals.cohorts.values())
        assert by_cohort == sum(getattr(stats, of_answers) for stats in found)
    for part in ("draft_seconds", "verify_seconds", "accept_seconds"):
        by_cohort = sum(getattr(cohort, part) for cohort in totals.cohorts.values())
        assert by_cohort == pytest.approx(getattr(totals, part))
    assert totals.cohorts["plain/sampled"].draft_seconds == 0


def test_what_a_request_has_cost_is_in_its_cohort_while_it_runs():
    core = engine()
    ask(core, "r")
    for _ in range(3):
        core.step()
    before = core.stats().cohorts
    assert sum(cohort.passes for cohort in before.values()) == 3
    core.step()
    after = core.stats().cohorts
    assert sum(cohort.tokens for cohort in after.values()) > sum(cohort.tokens for cohort in before.values())


def test_a_pass_is_divided_by_rows():
    core = engine(drafting=False)
    ask(core, "long", max_tokens=1)
    ask(core, "short", PROMPT[:5], max_tokens=1)
    found = finish(core)
    assert core.stats().steps == 1
    for part in ("verify_seconds", "accept_seconds"):
        long, short = getattr(found["long/0"], part), getattr(found["short/0"], part)
        assert long == pytest.approx(7 * short)


def test_counts_of_guesses_fit_together():
    core = engine()
    for i in range(6):
        ask(core, f"r{i}", seed=i)
    for stats in finish(core).values():
        assert 0 < stats.accepted < stats.drafted
        assert stats.rollback_tokens == stats.drafted - stats.accepted
        assert stats.rejected_kv_bytes == stats.rollback_tokens * core.target.kv_rows().bytes_per_row
        assert stats.drafted_per_position[0] == stats.drafts
        assert sum(stats.drafted_per_position) == stats.drafted, "chains have one guess at a level"
        assert sum(stats.accepted_per_position) == stats.accepted
        assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
        assert stats.passes == stats.output_tokens - stats.accepted, "every pass adds one token of its own"
        assert (stats.prompt_tokens, stats.output_tokens) == (35, 15)


def test_without_drafts_there_is_nothing_to_count():
    core = engine(drafting=False)
    ask(core, "r")
    stats = finish(core)["r/0"]
    assert (stats.drafts, stats.drafted, stats.accepted, stats.rollback_tokens) == (0, 0, 0, 0)
    assert (stats.passes, stats.method, stats.draft_seconds) == (15, "", 0)


def test_times_are_those_of_the_stages():
    core = engine(max_num_seqs=1)
    ask(core, "first")
    ask(core, "second")
    found = finish(core)
    first, second = found["first/0"], found["second/0"]
    for stats in found.values():
        assert min(stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds) > 0
    assert second.queue_seconds >= first.prefill_seconds + first.decode_seconds
    assert second.queue_seconds + second.prefill_seconds + second.decode_seconds < core._clock()


def test_the_tokens_of_the_first_pass_are_told_apart():
    core = engine()
    ask(core, "r")
    assert finish(core)["r/0"].first_tokens == 1  # the pass over a prompt has no guesses here
    accounting = Accounting(0.5)
    for tokens, now in ((4, 1.0), (3, 2.0)):
        part = RequestReport(lone_request([1]), Verdict(tokens=(1,) * tokens), run=1)
        accounting.observe(part, StepReport([part]), now)
    assert (accounting.first_token, accounting.first_tokens, accounting.finished) == (1.0, 4, 2.0)
    assert (accounting.first_passes, accounting.passes) == (1, 2)


def test_chunks_of_a_prompt_are_passes():
    core = engine(drafting=False, max_num_batched_tokens=10)
    ask(core, "r")
    stats = finish(core)["r/0"]
    assert (stats.first_passes, stats.passes) == (4, 3 + 15)


def test_cached_tokens_and_preemptions_are_counted():
    core = engine()
    ask(core, "new")
    core.step()
    core.scheduler.preempt(core.scheduler.running[0])
    stats = finish(core)["new/0"]
    assert stats.cached_tokens == 0, "what a preempted request finds again is its own"
    assert stats.preemptions == core.stats().preemptions == 1
    ask(core, "again")
    stats = finish(core)["again/0"]
    assert stats.cached_tokens == 32, "full pages before the last token"
    assert stats.preemptions == 0
    ask(core, "stranger")
    core.abort("stranger")
    core.add(NewRequest("foreign", PROMPT, PARAMS, tenant="another"))
    assert finish(core)["foreign/0"].cached_tokens == 0


def test_an_aborted_request_tells_what_it_has_cost():
    core = engine()
    ask(core, "r")
    assert [delta.stats.passes for delta in core.abort("r") if delta.stats] == [0]
    ask(core, "r")
    core.step()
    core.step()
    (delta,) = core.abort("r")
    assert delta.stats is not None
    assert delta.stats.passes == 2
    assert delta.stats.output_tokens >= 2
    assert delta.stats.queue_seconds > 0


def test_the_drafts_of_a_watched_answer_are_its_passes():
    core = engine()
    core.add(NewRequest("watched", PROMPT, PARAMS, progress=True))
    tokens: list[int] = []
    while core.has_requests:
        for delta in core.step():
            (draft,) = delta.drafts
            assert draft.gained == len(delta.token_ids)
            assert len(draft.accepted) == delta.from_draft
            guessed = tuple(draft.tokens[node] for node in draft.accepted)
            assert guessed == delta.token_ids[: len(guessed)]
            assert [draft.parents[node] for node in draft.accepted] == [-1, *draft.accepted][
                : len(draft.accepted)
            ]
            tokens += delta.token_ids
            if delta.progress is not None and delta.stats is not None:
                assert delta.progress.decode_seconds == delta.stats.decode_seconds
    assert len(tokens) == PARAMS.max_tokens


class Ticking:
    """A clock that takes a second for every look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_drafting_is_billed_to_those_who_were_asked():
    parts = EngineParts(EngineConfig(max_draft_share=1e9), clock=Ticking())
    core = EngineCore(tiny_decoder(VOCAB, 3), Vocabulary(VOCAB), parts)
    for name in ("plain", "speculating"):
        (request,) = core.add(NewRequest(name, PROMPT, PARAMS))
        if name == "speculating":
            request.speculation = DraftPlan("drawing", DrawingDrafter(VOCAB, 4), 4, 4)
    found = finish(core)
    assert found["plain/0"].draft_seconds == 0
    assert found["speculating/0"].draft_seconds == core.stats().draft_seconds > 0
    for stage in ("verify_seconds", "accept_seconds"):
        assert sum(getattr(stats, stage) for stats in found.values()) == pytest.approx(
            getattr(core.stats(), stage)
        )


def test_a_drafter_that_was_never_asked_is_not_named():
    """Guessing was switched off: neither the answer nor its cohort tells of the drafter."""
    core = engine()
    core.situation.speculating = False
    (request,) = core.add(NewRequest("off", PROMPT, PARAMS))
    request.speculation = DraftPlan("drawing", DrawingDrafter(VOCAB, 4), 4, 4)
    stats = finish(core)["off/0"]
    assert (stats.method, stats.cohort, stats.drafts) == ("", "plain/sampled", 0)
    assert core.stats().acceptance == {}
