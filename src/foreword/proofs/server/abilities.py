"""What a server takes, found by asking it."""

from dataclasses import dataclass
from typing import Any

from foreword.proofs.server.client import Body, Refused, Server

MOST_REQUESTS = 12
"""That probing costs at most."""

_FILTERS_OFF: tuple[Body, ...] = (
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0},
    {"top_p": 1.0},
)
"""What lets every token be drawn; servers have filters of their own by default, and not all take these fields."""

_PROBE: Body = {"prompt": "a b c", "max_tokens": 2, "temperature": 0.0}


@dataclass(frozen=True)
class Abilities:
    """Fields that a server understands."""

    filters_off: Body  # fields that turn its filters off
    logprobs: int = 0  # alternatives that it lists per token
    token_ids: bool = False  # it returns token ids, and takes them as a prompt
    n: int = 1  # answers per request


async def probe(server: Server) -> Abilities:
    """Ask for one thing at a time, from the most that is of use downwards."""
    filters = _FILTERS_OFF[-1]
    for fields in _FILTERS_OFF:
        if await _takes(server, **fields):
            filters = fields
            break
    logprobs = 0
    for count in (20, 5):
        answer = await _takes(server, logprobs=count)
        if answer and answer.first.tokens and answer.first.tokens[0].top:
            logprobs = count
            break
    answer = await _takes(server, return_token_ids=True)
    has_ids = bool(answer and answer.first.token_ids and answer.prompt_ids and server.route == "completions")
    if has_ids and answer is not None:
        has_ids = await _takes(server, prompt=answer.prompt_ids) is not None
    n = 1
    for count in (16, 4, 2):
        answer = await _takes(server, n=count, temperature=1.0, max_tokens=1)
        if answer and len(answer.choices) == count:
            n = count
            break
    return Abilities(filters, logprobs, has_ids, n)


async def _takes(server: Server, **fields: Any) -> Any:  # noqa: ANN401 - an Answer or None, and any JSON
    try:
        return await server.ask({**_PROBE, **fields})
    except Refused:
        return None
