"""Sampling parameters through the whole engine, with and without drafts, on a tiny decoder."""

from collections.abc import Sequence

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.rules.rule import Rule
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.backends.interface import KvStore
from foreword.backends.torch.decoder import TorchDecoder
from foreword.control.fixed import FixedPolicy
from foreword.engine.core import EngineCore
from foreword.engine.requests.request import Request
from foreword.proofs.passes import tiny_decoder
from foreword.proofs.statistics import DrawingDrafter
from helpers.engines import ask, core_on, run

VOCAB, EOS = 40, 7


WORDS = [[4, 5], [9]]


def engine(
    drafting: bool = False,
    rule: str = "coupled",
    decoder: TorchDecoder | None = None,
    words: Sequence[Sequence[int]] = (),
) -> EngineCore:
    return core_on(
        decoder or tiny_decoder(VOCAB, 3),
        end_ids=[EOS],
        words=words,
        policy=FixedPolicy(DrawingDrafter(VOCAB, 4), 4) if drafting else None,
        kv_cache_memory_bytes=1 << 20,
        acceptance_rule=rule,
    )


def answers(machine: EngineCore, params: Sequence[SamplingParams]) -> list[Request]:
    requests = [ask(machine, [1 + i % 5, 2, 3], chosen) for i, chosen in enumerate(params)]
    run(machine)
    return requests


ALL_KINDS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(seed=1, max_tokens=12),
    SamplingParams(seed=2, temperature=0.7, top_p=0.8, max_tokens=12),
    SamplingParams(seed=3, top_k=5, min_p=0.05, max_tokens=12),
    SamplingParams(seed=4, presence_penalty=1.0, frequency_penalty=0.5, max_tokens=12),
    SamplingParams(seed=5, repetition_penalty=1.5, min_tokens=6, max_tokens=12),
    SamplingParams(seed=6, logit_bias={4: 3.0, 5: 3.0}, max_tokens=12),
    SamplingParams(seed=7, allowed_token_ids=(3, 4, 5, 6), max_tokens=12),
]


def test_the_text_is_the_same_with_and_without_drafts_alone_and_together():
    together = [r.output_ids for r in answers(engine(words=WORDS), ALL_KINDS)]
    drafted = [r.output_ids for r in answers(engine(drafting=True, words=WORDS), ALL_KINDS)]
    assert drafted == together
    for i, params in enumerate(ALL_KINDS):
        machine = engine(drafting=True, words=WORDS)
        request = ask(machine, [1 + i % 5, 2, 3], params)
        run(machine)
        assert request.output_ids == together[i]


def test_drafts_are_accepted_in_these_tests():
    requests = answers(engine(drafting=True), [SamplingParams(seed=i, max_tokens=20) for i in range(20)])
    assert sum(r.accounting.passes for r in requests) < sum(len(r.output_ids) for r in requests)


@pytest.mark.parametrize("rule", [rule.name.lower() for rule in Rule])
def test_parameters_hold_under_every_rule(rule: str):
    params = [
        SamplingParams(seed=i, allowed_token_ids=(3, 4, 5, 6, EOS), min_tokens=5, max_tokens=9)
        for i in range(30)
    ]
    for request in answers(engine(True, rule, words=[[4, 5], [6]]), params):
        text = request.output_ids
        assert set(text) <= {3, 4, 5, EOS}
        assert len(text) >= 5
        assert all(pair != (4, 5) for pair in zip([3, *text], text, strict=False))


def test_seeds_are_obeyed_beside_requests_that_have_none():
    free, seeded = SamplingParams(max_tokens=8), SamplingParams(seed=11, max_tokens=8)
    runs = [answers(engine(), [seeded, free, free, seeded, free]) for _ in range(2)]
    assert runs[0][0].output_ids == runs[1][0].output_ids
    assert runs[0][3].output_ids == runs[1][3].output_ids
    used = [request.sampler.seed for run in runs for request in run if request.params.seed is None]
    assert len(set(used)) == 6
    assert runs[0][0].sampler.seed == 11


def test_stop_tokens_end_an_answer():
    plain = answers(engine(), [SamplingParams(seed=3, max_tokens=20, ignore_eos=True)])[0].output_ids
    stop = plain[5]
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    cut = answers(engine(drafting=True), [params])[0]
    assert cut.output_ids == plain[: plain.index(stop) + 1]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize("drafting", [False, True])
def test_there_is_a_logprob_for_every_token(drafting: bool):
    params = [SamplingParams(seed=i, logprobs=2, temperature=0.5, max_tokens=9) for i in range(6)]
    plain = answers(engine(), params)
    for request, same in zip(answers(engine(drafting), params), plain, strict=True):
        assert [entry.token for entry in request.answer.logprobs] == request.output_ids
        assert [e.logprob for e in request.answer.logprobs] == pytest.approx(
            [e.logprob for e in same.answer.logprobs], abs=1e-5
        )


class PoisonedDecoder(TorchDecoder):
    """Says NaN after token 5, as a broken kernel might."""

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        output = super().forward(batch, store)
        logits = output.logits.clone()
        logits[batch.token_ids[batch.logit_rows.long()] == 5] = torch.nan
        return ForwardOutput(logits, output.hidden)


def test_nan_ends_its_own_request_with_an_error():
    sound = tiny_decoder(VOCAB, 3)
    params = [SamplingParams(seed=i, max_tokens=10) for i in range(24)]
    expected = answers(engine(), params)
    failed = answers(engine(drafting=True, decoder=PoisonedDecoder(sound.config, sound.weights)), params)
    hit = 0
    for request, sane in zip(failed, expected, strict=True):
        inner = sane.output_ids[:-1]
        if 5 in inner:
            hit += 1
            assert request.finish_reason == "error"
            assert "NaN" in (request.answer.error or "")
            assert request.output_ids == sane.output_ids[: inner.index(5) + 1], "what came before the NaN"
        else:
            assert request.output_ids == sane.output_ids
            assert request.finish_reason == sane.finish_reason
    assert 0 < hit < 24
