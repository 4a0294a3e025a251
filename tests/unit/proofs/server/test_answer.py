"""Both of OpenAI's routes, whole and streamed, in one form."""

import asyncio

import httpx2
import pytest

from foreword.proofs.server.client import Broken, RefusedByServer, Server, ServerAnswer, TokenUsage
from helpers.known_law_server import stream_response

ENTRY = {
    "token": "a",
    "logprob": -0.5,
    "top_logprobs": [{"token": "b", "logprob": -1.0}, {"token": "a", "logprob": -0.5}],
}
COUNTS = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def ask(
    response: httpx2.Response, *, stream: bool = False, route: str = "chat"
) -> tuple[ServerAnswer, list[bytes]]:
    seen: list[bytes] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.content)
        return response

    async def run() -> ServerAnswer:
        async with httpx2.AsyncClient(base_url="http://x", transport=httpx2.MockTransport(handle)) as client:
            server = Server(client, "m", route, {"extra": 1})
            body = {"prompt": "hi", "max_tokens": 1, "logprobs": 2}
            return await (server.stream if stream else server.ask)(body)

    return asyncio.run(run()), seen


def test_chat_is_asked_and_read():
    choice = {
        "index": 0,
        "message": {"content": "a"},
        "finish_reason": "length",
        "logprobs": {"content": [ENTRY]},
    }
    answer, (sent,) = ask(httpx2.Response(200, json={"choices": [choice], "usage": COUNTS}))
    assert b'"messages":[{"role":"user","content":"hi"}]' in sent
    assert b'"logprobs":true,"top_logprobs":2' in sent
    assert b'"extra":1' in sent
    assert answer.contents == [(0, "a", "length")]
    assert answer.first.tokens[0].top == (("a", -0.5), ("b", -1.0))
    assert answer.usage == TokenUsage(3, 1, 4)


def test_chunks_of_several_answers_are_put_together():
    parts = [(1, "x", None), (0, "a", None), (1, "y", "stop"), (0, "b", "length")]
    events = [
        {"choices": [{"index": i, "delta": {"content": text}, "finish_reason": end}]}
        for i, text, end in parts
    ]
    answer, _ = ask(stream_response([*events, {"choices": [], "usage": COUNTS}]), stream=True)
    assert answer.contents == [(0, "ab", "length"), (1, "xy", "stop")]


@pytest.mark.parametrize(
    ("response", "error", "words"),
    [
        (httpx2.Response(400, json={"error": {"message": "no n"}}), RefusedByServer, "no n"),
        (httpx2.Response(500, json={"error": {"message": "oops"}}), Broken, "oops"),
        (httpx2.Response(200, json={"answer": 42}), Broken, "not one of OpenAI's"),
        (httpx2.Response(200, content=b"<html>"), Broken, "not one of OpenAI's"),
    ],
)
def test_what_is_no_answer_is_told_apart(response, error, words):
    with pytest.raises(error, match=words):
        ask(response)


def test_a_stream_must_say_that_it_is_over():
    with pytest.raises(Broken, match="does not end"):
        ask(stream_response([{"choices": []}], done=False), stream=True)
