"""Fields that a server takes, found by sending them."""

from dataclasses import dataclass
from typing import Any

from foreword.proofs.server.answer import Answer
from foreword.proofs.server.client import Body, Broken, Refused, Server

FILTERS_OFF: Body = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,  # vLLM, SGLang, TGI
    "repeat_penalty": 1.0,  # llama.cpp, llama-cpp-python, Ollama
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "mirostat": 0,  # llama.cpp
    "mirostat_mode": 0,  # llama-cpp-python
}
"""Filters and penalties under their usual names, each with the value that switches it off.

Servers have some of them on by default, and ignore or refuse the names that they do not know.
"""

_LISTED = (20, 5)  # alternatives per token, most first
_ANSWERS = (16, 4, 2)  # answers per request, most first

MOST_REQUESTS = 2 + len(FILTERS_OFF) + len(_LISTED) + 2 + len(_ANSWERS)
"""Requests that probing sends at most."""

_PROBE: Body = {"prompt": "a b c", "max_tokens": 2, "temperature": 0.0}


@dataclass(frozen=True)
class Abilities:
    """Fields that a server understands."""

    filters_off: Body  # fields that switch its filters off
    logprobs: int = 0  # alternatives that it lists per token
    token_ids: bool = False  # it returns token ids, and takes them as a prompt
    n: int = 1  # answers per request


async def probe(server: Server) -> Abilities:
    """Send one optional field after the other; `Broken` or `Refused` if a request without them fails."""
    await server.ask(_PROBE)
    filters = await _filters_off(server)
    logprobs = 0
    for count in _LISTED:
        answer = await _answer(server, logprobs=count)
        if answer and answer.first.tokens and answer.first.tokens[0].top:
            logprobs = count
            break
    answer = await _answer(server, return_token_ids=True)
    has_ids = bool(answer and answer.first.token_ids and answer.prompt_ids and server.route == "completions")
    if has_ids and answer is not None:
        has_ids = await _answer(server, prompt=answer.prompt_ids) is not None
    n = 1
    for count in _ANSWERS:
        answer = await _answer(server, n=count, temperature=1.0, max_tokens=1)
        if answer and len(answer.choices) == count:
            n = count
            break
    return Abilities(filters, logprobs, has_ids, n)


async def _filters_off(server: Server) -> Body:
    """Return all filters' fields, or those that the server takes one by one where it refuses all together."""
    if await _answer(server, **FILTERS_OFF):
        return FILTERS_OFF
    return {name: off for name, off in FILTERS_OFF.items() if await _answer(server, **{name: off})}


async def _answer(server: Server, **fields: Any) -> Answer | None:  # noqa: ANN401 - any JSON
    """Return the answer to a request with these fields; None where the server refuses it or fails."""
    try:
        return await server.ask({**_PROBE, **fields})
    except (Broken, Refused):
        return None
