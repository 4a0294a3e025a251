"""Requests sent at once, and what fails only then."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from foreword.errors import RequestError
from foreword.proofs.server.answer import Answer
from foreword.proofs.server.client import Body, Broken, Refused, Server

_FAILURES = (Broken, Refused, RequestError)


@dataclass(frozen=True)
class Call:
    """One request of several that are sent at once."""

    body: Body
    streamed: bool = False


class FailsTogether(Exception):  # noqa: N818 - says what the server did
    """A request fails beside others and succeeds alone."""

    def __init__(self, failure: str, prompt: str, alone: Answer, bodies: Sequence[Body]) -> None:
        super().__init__(failure)
        self.prompt = prompt
        self.alone = alone  # the answer to the same request alone
        self.bodies = bodies  # sent at once, they show it


async def send_together(server: Server, calls: Sequence[Call]) -> list[Answer]:
    """Return the answers to calls sent at once.

    `FailsTogether` if a call fails that succeeds alone; a call that fails alone too raises what it raised alone.
    """
    found = await _send(server, calls)
    for place, result in enumerate(found):
        if not (failure := _failure(result)):
            continue
        alone = await server.send(calls[place].body, streamed=calls[place].streamed)
        if isinstance(result, Answer) and alone.is_cut:
            continue  # it never has a finish_reason: concurrency has no part in it
        group = await _smallest_group(server, calls, place)
        raise FailsTogether(failure, calls[place].body["prompt"], alone, group)
    return [result for result in found if isinstance(result, Answer)]


async def _smallest_group(server: Server, calls: Sequence[Call], failing: int) -> list[Body]:
    """Return the bodies of two calls that show the failure, or of all where no pair does."""
    group = calls
    for other in range(len(calls)):
        pair = [calls[place] for place in sorted((failing, other))]
        if other != failing and any(map(_failure, await _send(server, pair))):
            group = pair
            break
    return [server.wire_body(call.body, streamed=call.streamed) for call in group]


async def _send(server: Server, calls: Sequence[Call]) -> list[Answer | BaseException]:
    sent = (server.send(call.body, streamed=call.streamed) for call in calls)
    return await asyncio.gather(*sent, return_exceptions=True)


def _failure(result: Answer | BaseException) -> str:
    """Return why a result is no whole answer; empty if it is one."""
    if isinstance(result, Answer):
        return "the answer was cut off: it has no finish_reason" if result.is_cut else ""
    if isinstance(result, _FAILURES):
        return str(result)
    raise result
