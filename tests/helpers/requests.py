"""Requests without an engine."""

from collections.abc import Sequence
from itertools import count

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.engine.requests.answer import RequestLimits
from foreword.engine.requests.request import Request

_numbers = count()


def lone_request(
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    vocab_size: int = 1 << 20,
    rule: Rule = Rule.COUPLED,
    bad_words: Sequence[Sequence[int]] = (),
) -> Request:
    """A prompt that has computed nothing; its context never ends."""
    chosen = params or SamplingParams(temperature=0)
    limits = TokenLimits(vocab_size, bad_words=tuple(map(tuple, bad_words)))
    sampler = RequestSampler(chosen, limits, prompt, seed=0, rule=rule)
    return Request(next(_numbers), prompt, chosen, sampler, RequestLimits(1 << 30, frozenset()))
