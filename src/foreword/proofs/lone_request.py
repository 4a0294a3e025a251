"""A request without an engine, for measuring single passes."""

from collections.abc import Sequence

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.engine.requests.request import Request, RequestLimits
from foreword.kv.paged_cache import PagedCache


def lone_request(
    cache: PagedCache,
    prompt: Sequence[int],
    vocab_size: int,
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    rule: Rule = Rule.COUPLED,
) -> Request:
    """A prompt with KV pages of its own and nothing computed; its context never ends."""
    chosen = params or SamplingParams(temperature=0)
    sampler = RequestSampler(chosen, TokenLimits(vocab_size), prompt, seed, rule=rule)
    request = Request(seed, prompt, chosen, sampler, RequestLimits(1 << 30, frozenset()))
    request.kv = cache.open()
    return request
