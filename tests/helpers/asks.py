"""Requests and asks for drafters that are tested alone."""

from collections.abc import Sequence
from itertools import count

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.speculation.drafting import DraftRequest, DraftTask

_numbers = count()


def text_request(
    tokens: Sequence[int],
    *,
    prompt_len: int = 0,
    tenant: str = "",
    epoch: int = 0,
    request_id: int | None = None,
    vocab_size: int = 1 << 20,
    temperature: float = 0.0,
    seed: int = 0,
) -> DraftRequest:
    """A request that is only its text."""
    params = SamplingParams(temperature=temperature)
    sampler = RequestSampler(params, TokenLimits(vocab_size), list(tokens), seed)
    number = next(_numbers) if request_id is None else request_id
    return DraftRequest(number, tokens, sampler.drafting(), prompt_len, tenant, epoch)


def ask(request: DraftRequest | Sequence[int], max_nodes: int = 8, max_depth: int = 64) -> DraftTask:
    if not isinstance(request, DraftRequest):
        request = text_request(request)
    return DraftTask(request, max_nodes, max_depth)
