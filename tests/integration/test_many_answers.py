"""n > 1: every answer is the one that its index alone gives, and the prompt is held once."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.control.fixed import FixedPolicy
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.proofs.passes import tiny_decoder
from foreword.proofs.statistics import DrawingDrafter
from foreword.speculation.requests import Verdict
from helpers.engines import core_on, run

VOCAB, EOS = 40, 7
PROMPT = tuple((5 * i + 1) % VOCAB for i in range(35))  # two full pages and a part of a third
PARAMS = SamplingParams(seed=9, max_tokens=12, logit_bias={EOS: 1.5})
N = 5


def engine(drafting: bool = False, **config: object) -> EngineCore:
    sizes = {"kv_cache_memory_bytes": 1 << 20} | config
    policy = FixedPolicy(DrawingDrafter(VOCAB, 4), 4) if drafting else None
    return core_on(tiny_decoder(VOCAB, 3), end_ids=[EOS], policy=policy, **sizes)


def ends(requests: Sequence[Request]) -> list[tuple[list[int], str | None]]:
    return [(request.output_ids, request.finish_reason) for request in requests]


def alone(index: int, core: EngineCore) -> Request:
    """The answer of one index without its siblings."""
    request = core.prepare(NewRequest("alone", PROMPT, replace(PARAMS, n=index + 1)))[index]
    request.scheduling.leader = None
    request.sampler = RequestSampler(PARAMS, TokenLimits(VOCAB, (EOS,)), PROMPT, 9, sample=index)
    request.answer._sampler = request.sampler
    core.enqueue([request])
    run(core)
    return request


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], str | None]]:
    found = ends([alone(index, engine()) for index in range(N)])
    assert len({len(tokens) for tokens, _ in found}) > 1, "they should end at different places"
    assert {reason for _, reason in found} == {"stop", "length"}
    return found


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 1},  # the first answer has ended before the second begins
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": False, "max_num_seqs": 2, "max_num_batched_tokens": 5},
        {"kv_cache_memory_bytes": 5 * 16 * 64},  # pages for little more than one of them
    ],
    ids=str,
)
@pytest.mark.parametrize("drafting", [False, True])
def test_answers_depend_on_their_index_alone(expected, config: dict, drafting: bool):
    core = engine(drafting, **config)
    for n in (N, 2):
        requests = core.add(NewRequest(f"n={n}", PROMPT, replace(PARAMS, n=n)))
        while core.has_requests:
            core.step()
            core.check_integrity()
        assert ends(requests) == expected[:n]
    assert core.cache.available_pages == core.cache.pool.num_pages


def test_the_prompt_is_held_once():
    for caching in (False, True):
        core = engine(enable_prefix_caching=caching)
        core.add(NewRequest("n", PROMPT, replace(PARAMS, n=8, ignore_eos=True)))
        most = 0
        while core.has_requests:
            core.step()
            most = max(most, core.stats().kv_pages_used)
        assert most == 2 + 8 * 1, "two shared pages, and for each answer the page that it writes"


def test_the_prompt_is_computed_once():
    core = engine(enable_prefix_caching=False)
    requests = core.add(NewRequest("n", PROMPT, replace(PARAMS, n=4)))
    run(core)
    assert [request.accounting.cached_tokens for request in requests] == [0, 34, 34, 34]


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 64])
def test_the_prompt_is_computed_once_where_the_first_ends_at_once(max_tokens: int, max_num_seqs: int):
    core = engine(enable_prefix_caching=False, max_num_seqs=max_num_seqs)
    requests = core.add(NewRequest("n", PROMPT, replace(PARAMS, n=4, max_tokens=max_tokens)))
    while core.has_requests:
        core.step()
        core.check_integrity()
    assert [request.accounting.cached_tokens for request in requests] == [0, 34, 34, 34]
    assert ends(requests) == ends(run_apart(4, max_tokens))
    assert core.cache.available_pages == core.cache.pool.num_pages
    assert core.cache.num_open == 0


def run_apart(n: int, max_tokens: int) -> list[Request]:
    """Each answer reads the prompt by itself."""
    core = engine(enable_prefix_caching=False)
    requests = core.prepare(NewRequest("n", PROMPT, replace(PARAMS, n=n, max_tokens=max_tokens)))
    for request in requests:
        request.scheduling.leader = None
    core.enqueue(requests)
    run(core)
    assert [request.accounting.cached_tokens for request in requests] == [0] * n
    return requests


def test_a_prompt_is_not_kept_from_those_who_lack_pages():
    core = engine(enable_prefix_caching=False, kv_cache_memory_bytes=5 * 16 * 64, max_num_seqs=1)
    requests = core.add(NewRequest("n", PROMPT, replace(PARAMS, n=2, max_tokens=1)))
    core.step()
    assert len(core.scheduler.kept_prompts) == 1
    pages = core.cache.pool.num_pages
    prompt = PROMPT[:1] * (16 * pages - 16)
    (large,) = core.add(NewRequest("large", prompt, replace(PARAMS, n=1, max_tokens=1), priority=-1))
    core.step()
    assert large.finish_reason == "length"
    assert len(core.scheduler.kept_prompts) == 0
    run(core)
    assert ends(requests) == ends(run_apart(2, 1))


def test_a_prompt_is_given_up_before_anyone_is_preempted():
    core = engine(enable_prefix_caching=False, kv_cache_memory_bytes=9 * 16 * 64, max_num_seqs=2)
    long = replace(PARAMS, n=1, max_tokens=48, ignore_eos=True)  # four pages
    requests = core.add(NewRequest("n", PROMPT, replace(PARAMS, n=2, max_tokens=1)))
    others = [*core.add(NewRequest("a", PROMPT[:9], long, priority=-1))]
    others += core.add(NewRequest("b", PROMPT[:9], long, priority=-1))
    requests[0].service = replace(requests[0].service, priority=-2)  # it runs beside one of the others
    core.step()
    assert requests[0].finish_reason == "length"
    core.step()
    assert len(core.scheduler.kept_prompts) == 1
    run(core)
    assert [len(request.output_ids) for request in others] == [48, 48]
    assert core.scheduler.preemptions == 0
    assert ends(requests) == ends(run_apart(2, 1))


@pytest.mark.parametrize("reason", ["abort", "error", "deadline"])
def test_a_prompt_is_not_kept_of_an_answer_that_did_not_end_by_itself(reason: str):
    """Its rows may be what was wrong with it."""
    core = engine(enable_prefix_caching=False, max_num_seqs=1)
    leader, follower = core.add(NewRequest("n", PROMPT, replace(PARAMS, n=2, max_tokens=4)))
    core.step()
    assert leader.finish_reason is None
    leader.answer.finish(reason)
    core.scheduler.remove(leader)
    assert len(core.scheduler.kept_prompts) == 0
    run(core)
    assert follower.accounting.cached_tokens == 0
    assert ends([follower]) == ends(run_apart(2, 4)[1:])


def test_a_prompt_is_not_kept_for_those_who_are_gone():
    core = engine(enable_prefix_caching=False, max_num_seqs=1)
    core.add(NewRequest("n", PROMPT, replace(PARAMS, n=3, max_tokens=1)))
    core.step()
    assert len(core.scheduler.kept_prompts) == 1
    core.abort("n")
    assert core.cache.num_open == 0


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("max_num_seqs", [1, 3, 64])
def test_an_abort_ends_all_of_them(steps: int, max_num_seqs: int):
    core = engine(drafting=True, max_num_batched_tokens=17, max_num_seqs=max_num_seqs)
    others = core.add(NewRequest("other", PROMPT[:9], replace(PARAMS, n=2)))
    requests = core.add(NewRequest("gone", PROMPT, replace(PARAMS, n=N, ignore_eos=True)))
    for _ in range(steps):
        core.step()
    left = [request.identity.index for request in requests if request.finish_reason is None]
    under_way = core.launch()
    assert [(delta.index, delta.finish_reason) for delta in core.abort("gone")] == [
        (i, "abort") for i in left
    ]
    assert under_way is not None
    assert all(delta.request_id == "other" for delta in core.resolve(under_way))
    assert core.abort("gone") == []
    core.check_integrity()
    run(core)
    quiet = engine()
    same = quiet.add(NewRequest("other", PROMPT[:9], replace(PARAMS, n=2)))
    run(quiet)
    assert ends(others) == ends(same)
    assert core.cache.available_pages == core.cache.pool.num_pages


@pytest.mark.parametrize("caching", [False, True])
def test_siblings_go_on_when_the_first_fails(expected, caching: bool):
    core = engine(max_num_batched_tokens=9, enable_prefix_caching=caching)
    requests = core.add(NewRequest("n", PROMPT, replace(PARAMS, n=N)))

    def refuse(_verdict: Verdict) -> None:
        raise RuntimeError("no more")

    core.step()
    requests[0].commit = refuse  # type: ignore[method-assign]
    run(core)
    assert requests[0].finish_reason == "error"
    assert ends(requests[1:]) == expected[1:]
    assert core.cache.available_pages == core.cache.pool.num_pages


def test_siblings_go_on_when_the_first_is_preempted(expected):
    core = engine(max_num_batched_tokens=9, enable_prefix_caching=False)
    requests = core.add(NewRequest("n", PROMPT, replace(PARAMS, n=N)))
    for step in range(200):
        if not core.has_requests:
            break
        if step in (2, 5, 9, 14) and core.scheduler.running:
            core.scheduler.preempt(core.scheduler.running[0])
        core.step()
        core.check_integrity()
    assert ends(requests) == expected
    assert sum(request.accounting.preemptions for request in requests) >= 3


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_num_seqs", [1, 64])
@pytest.mark.parametrize("drafting", [False, True])
def test_one_token_takes_one_pass_and_no_more(n: int, max_num_seqs: int, drafting: bool):
    core = engine(drafting, max_num_seqs=max_num_seqs, enable_prefix_caching=False)
    requests = core.add(NewRequest("one", PROMPT, replace(PARAMS, n=n, max_tokens=1)))
    for _ in range(n):
        core.step()
    assert not core.has_requests
    assert [len(request.output_ids) for request in requests] == [1] * n
    assert all(request.acceptance.drafted == 0 for request in requests)
