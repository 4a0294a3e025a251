"""Log probabilities of answers and prompts are those of one plain pass over the whole text."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.engine.core import EngineCore
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.proofs.passes import tiny_decoder
from foreword.speculation.drafting import DraftRequest
from helpers.engines import core_on
from helpers.passes import all_logits
from helpers.scripted_target import ScriptDrafter

VOCAB, CONTEXT = 40, 64
TOLERANCE = 1e-4

PARAMS = (
    SamplingParams(temperature=0, logprobs=3, max_tokens=24),
    SamplingParams(seed=1, logprobs=0, max_tokens=30),
    SamplingParams(seed=2, temperature=0.3, top_k=4, logprobs=5, max_tokens=20),
    SamplingParams(seed=3, presence_penalty=2, frequency_penalty=1, logprobs=2, max_tokens=25),
    SamplingParams(seed=4, repetition_penalty=1.8, logit_bias={7: 5.0}, min_tokens=9, logprobs=1),
    SamplingParams(seed=5, temperature=1.7, allowed_token_ids=(3, 9, 11, 12), logprobs=4, max_tokens=24),
)
PROMPT_LENS = (1, 2, 17, 40, 55, 62)  # the last ones meet the end of the context


def prompt(length: int) -> tuple[int, ...]:
    return tuple((7 * i * i + length) % VOCAB for i in range(length))


def engine(policy: FixedPolicy | None = None, **config: object) -> EngineCore:
    sizes = {"kv_cache_memory_bytes": 1 << 20} | config
    return core_on(tiny_decoder(VOCAB, 3), end_ids=[39], policy=policy, **sizes)


def answers(
    core: EngineCore, requests: Sequence[NewRequest], preempt_at: Sequence[int] = ()
) -> dict[str, list[AnswerDelta]]:
    """The deltas of all requests; the newest request that runs is preempted after some of the steps."""
    found: dict[str, list[AnswerDelta]] = {}
    for request in requests:
        core.add(request)
    step = 0
    while core.has_requests:
        for delta in core.step():
            found.setdefault(f"{delta.request_id}/{delta.index}", []).append(delta)
        core.check_integrity()
        step += 1
        if step in preempt_at and core.scheduler.running:
            core.scheduler.preempt(core.scheduler.running[-1])
    return found


def tokens_of(deltas: Sequence[AnswerDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@cache
def texts() -> dict[str, list[int]]:
    """What comes out without drafts."""
    return {name: tokens_of(deltas) for name, deltas in answers(engine(), requests()).items()}


def requests() -> list[NewRequest]:
    pairs = zip(PROMPT_LENS, PARAMS, strict=True)
    return [
        NewRequest(f"r{length}", prompt(length), replace(params, ignore_eos=True)) for length, params in pairs
    ]


def knowing_policy(seed: int) -> FixedPolicy:
    """Drafts of what comes out, some of them wrong, some of them trees."""

    def next_token(request: DraftRequest, place: int) -> int:
        known = texts()[f"r{request.prompt_len}/0"]  # every prompt has a length of its own
        return known[min(place, len(known) - 1)]

    return FixedPolicy(ScriptDrafter(next_token, VOCAB, seed), 12, 5)


def check_scores(scores: Sequence[TokenLogprobs], text: Sequence[int], first: int, wanted: int) -> None:
    """The scores are of text[first:], in order."""
    rescored = all_logits(tiny_decoder(VOCAB, 3), text).float().log_softmax(dim=-1)
    assert [entry.token for entry in scores] == list(text[first:])
    for place, entry in enumerate(scores, start=first - 1):
        row = rescored[place]
        own = float(row[entry.token])
        assert abs(entry.logprob - own) < TOLERANCE
        assert abs(entry.rank - 1 - int((row > own).sum())) <= int((abs(row - own) < TOLERANCE).sum()) - 1
        assert len(entry.top_ids) == wanted
        assert np.abs(entry.top_logprobs - row.topk(wanted).values.numpy()).max(initial=0) < TOLERANCE
        assert (
            np.abs(entry.top_logprobs - row[torch.from_numpy(entry.top_ids)].numpy()).max(initial=0)
            < TOLERANCE
        )


@pytest.mark.parametrize("chunk", [6, 7, 20, 512])
@pytest.mark.parametrize("drafting", [False, True])
def test_of_accepted_corrected_and_own_tokens(chunk: int, drafting: bool):
    policy = knowing_policy(chunk) if drafting else None
    found = answers(engine(policy, max_num_batched_tokens=chunk), requests(), preempt_at=[9, 15])
    kinds = {"accepted": 0, "own": 0, "rejected": 0}
    for request in requests():
        deltas = found[f"{request.request_id}/0"]
        tokens = tokens_of(deltas)
        assert tokens == texts()[f"{request.request_id}/0"]
        scores = [entry for delta in deltas for entry in delta.logprobs]
        text = [*request.prompt_token_ids, *tokens]
        check_scores(scores, text, len(request.prompt_token_ids), request.params.logprobs or 0)
        stats = deltas[-1].stats
        assert stats is not None
        kinds["accepted"] += stats.accepted
        kinds["own"] += len(tokens) - stats.accepted
        kinds["rejected"] += stats.rollback_tokens
    assert not drafting or chunk < 20 or min(kinds.values()) > 0, kinds
    assert len(texts()["r62/0"]) == CONTEXT - 62, "one answer has to meet the end of the context"


@pytest.mark.parametrize(
    ("chunk", "caching", "preempt_at"),
    [
        *(
            (3, False, (2, 4, 9)),
            (3, True, (1, 3, 5, 7, 12)),
            (4, False, (1, 3, 5, 7, 12)),
            (4, True, (2, 4, 9)),
        ),
        *(
            (5, False, (2, 4, 9)),
            (5, True, ()),
            (6, False, ()),
            (6, True, (2, 4, 9)),
            (7, True, (1, 3, 5, 7, 12)),
        ),
        *((512, False, ()), (512, True, (2, 4, 9))),
    ],
)
def test_of_prompts(chunk: int, caching: bool, preempt_at: tuple[int, ...]):
    core = engine(knowing_policy(chunk), max_num_batched_tokens=chunk, enable_prefix_caching=caching)
    params = SamplingParams(seed=1, logprobs=0, prompt_logprobs=2, max_tokens=4, ignore_eos=True)
    lengths = [length for length in PROMPT_LENS if length < 60]
    for repeat in range(2):  # the second time the prompts are in the prefix cache
        asked = [NewRequest(f"r{length}", prompt(length), params) for length in lengths]
        found = answers(core, asked, preempt_at)
        for request in asked:
            first, *later = found[f"{request.request_id}/0"]
            assert all(delta.prompt_logprobs == () for delta in later)
            check_scores(first.prompt_logprobs, request.prompt_token_ids, 1, 2)
            tokens = tokens_of([first, *later])
            scores = [entry for delta in [first, *later] for entry in delta.logprobs]
            check_scores(scores, [*request.prompt_token_ids, *tokens], len(request.prompt_token_ids), 0)
        assert core.cache.available_pages == core.cache.pool.num_pages, repeat


@pytest.mark.parametrize("at_once", [1, 2, 64])
def test_of_a_prompt_with_several_answers(at_once: int):
    core = engine(max_num_batched_tokens=7, max_num_seqs=at_once)
    params = SamplingParams(seed=1, n=3, prompt_logprobs=1, max_tokens=3, ignore_eos=True)
    found = answers(core, [NewRequest("r", prompt(21), params)], preempt_at=[2, 6])
    check_scores(found["r/0"][0].prompt_logprobs, prompt(21), 1, 1)
    assert all(not delta.prompt_logprobs for i in (1, 2) for delta in found[f"r/{i}"])


def test_of_a_prompt_beside_requests_that_want_none():
    core = engine(knowing_policy(3), max_num_batched_tokens=13)
    wanting = NewRequest("wants", prompt(33), SamplingParams(seed=1, prompt_logprobs=0, max_tokens=2))
    found = answers(core, [*requests()[:3], wanting, *requests()[3:]])
    check_scores(found["wants/0"][0].prompt_logprobs, prompt(33), 1, 0)
    for request in requests():
        deltas = found[f"{request.request_id}/0"]
        assert tokens_of(deltas) == texts()[f"{request.request_id}/0"]
        assert all(not delta.prompt_logprobs for delta in deltas)
