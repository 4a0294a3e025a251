"""Parameters that make no sense are refused by name, before anything runs."""

import math

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-9),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: 101.0}),
        ("bad_words", "word"),
        ("bad_words", ("",)),
        ("allowed_token_ids", ()),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 300),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", 65),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(top_k=11), "top_k"),
        (SamplingParams(logprobs=11), "logprobs"),
        (SamplingParams(prompt_logprobs=11), "prompt_logprobs"),
        (SamplingParams(logit_bias={10: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=(10,)), "stop_token_ids"),
        (SamplingParams(allowed_token_ids=(3, -1)), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(2,), min_tokens=1), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(4,)), "allowed_token_ids"),
    ],
)
def test_what_the_vocabulary_cannot_do_is_refused_by_name(params: SamplingParams, name: str):
    with pytest.raises(RequestError, match=name):
        RequestSampler(params, TokenLimits(10, (2,), ((4,),)), [1], seed=0)


def test_defaults_ask_for_nothing():
    sampler = RequestSampler(SamplingParams(), TokenLimits(10, (2,)), [1], seed=0)
    assert not sampler.record["corrects"]
