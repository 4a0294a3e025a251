"""Where a router sends requests, what it passes on, and what it never does."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from foreword import __version__
from foreword.errors import RequestError
from foreword.server.router import targets as targets_module
from foreword.server.router.targets import BLOCK, LOAD_SLACK, PrefixMemory, Targets, TargetWatch, prefix_text
from helpers.router_world import Answer, Fleet, Parts, broken, call, refusing, run, said, stream

LONG = "the beginning that all of these have in common. " * 40


def test_a_prompt_goes_where_its_beginning_is_known_and_others_to_whoever_has_least():
    fleet = Fleet("a", "b", "c")

    async def go() -> None:
        await fleet.ask(LONG)
        await fleet.ask("something else")
        for number in range(3):
            await fleet.ask(LONG + f"question {number}")

    run(go())
    assert fleet.asked == ["a", "b", "a", "a", "a"]
    assert b"foreword:router_prefix_hits_total 3.0" in fleet.metrics.exposition(fleet.targets)


def test_a_target_that_has_too_much_to_do_gets_no_more_for_what_it_knows():
    fleet = Fleet("a", "b")
    run(fleet.ask(LONG))
    fleet.target("a").mark_ready(LOAD_SLACK)
    run(fleet.ask(LONG))
    fleet.target("a").mark_ready(5 * LOAD_SLACK)
    run(fleet.ask(LONG))
    assert fleet.asked == ["a", "a", "b"]


def test_what_one_tenant_asks_tells_another_nothing():
    memory = PrefixMemory()
    mine, theirs = memory.keys(b"Bearer me", LONG), memory.keys(b"Bearer they", LONG)
    assert not set(mine.keys) & set(theirs.keys)
    memory.note(mine, "a")
    assert memory.find(memory.keys(b"Bearer me", LONG + "more")) == "a"
    assert memory.find(theirs) is None
    assert not set(mine.keys) & set(PrefixMemory().keys(b"Bearer me", LONG).keys)

    fleet = Fleet("a", "b")
    run(fleet.ask(LONG, key="me"))
    fleet.target("a").answered = 0
    fleet.target("a").mark_ready(1)  # known, and not too busy: only who knows it goes there
    run(fleet.ask(LONG, key="they"))
    run(fleet.ask(LONG, key="me"))
    assert fleet.asked == ["a", "b", "a"]


def test_tenants_are_told_apart_by_either_header():
    fleet = Fleet("a", "b")
    run(fleet.ask(LONG, headers={"x-api-key": "me"}))
    run(fleet.ask(LONG, headers={"x-api-key": "you"}))
    run(fleet.ask(LONG, headers={"x-api-key": "me"}))
    run(fleet.ask(LONG, key="me"))  # the same key
    assert fleet.asked == ["a", "b", "a", "a"]


def test_a_router_with_keys_takes_them_by_either_header_and_passes_them_on():
    fleet = Fleet("a", keys=("me",))
    assert run(fleet.ask(headers={"x-api-key": "me"})).status == 200
    assert fleet.seen[-1].headers["x-api-key"] == "me"
    assert run(fleet.ask(headers={"x-api-key": "you"})).status == 401


def test_one_tenant_forgets_only_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(targets_module, "MOST_PREFIXES", 8)
    monkeypatch.setattr(targets_module, "MOST_TENANTS", 2)
    memory = PrefixMemory()
    first = memory.keys(b"1", LONG)
    memory.note(first, "a")
    for number in range(20):
        memory.note(memory.keys(b"2", f"{number} {LONG}"), "b")
    assert memory.find(first) == "a"
    memory.note(memory.keys(b"3", LONG), "c")
    assert memory.find(first) is None  # of too many tenants the one that was not heard of for longest


def test_refused_requests_are_remembered_nowhere():
    fleet = Fleet("a", "b")
    fleet.answers["a"] = lambda request: said(401, {"error": {}})
    assert run(fleet.ask(LONG)).status == 401
    run(fleet.ask(LONG))
    assert fleet.asked == ["a", "b"]


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (refusing, "down"),
        (lambda request: stream(broken()), "broke off"),
        (lambda request: said(503, {"error": {"message": "leaving"}}), "503"),
        (lambda request: said(429, {"error": {"message": "full"}}), "429"),
    ],
)
def test_as_long_as_nothing_was_passed_on_another_target_is_asked(first: Answer, reason: str):
    fleet = Fleet("a", "b")
    fleet.answers["a"] = first
    told = run(fleet.ask())
    assert (told.status, told.body, told.is_whole) == (200, b"data: 1\n\ndata: [DONE]\n\n", True)
    assert fleet.asked == ["a", "b"]
    assert f'foreword:router_retries_total{{reason="{reason}"}} 1.0'.encode() in fleet.metrics.exposition(
        fleet.targets
    )
    assert fleet.target("a").is_ready == (reason != "down")


def test_an_answer_of_which_a_byte_was_passed_on_is_never_asked_for_again():
    fleet = Fleet("a", "b")
    fleet.answers["a"] = lambda request: stream(b"data: 1\n\n", broken())
    told = run(fleet.ask())
    assert fleet.asked == ["a"]
    assert told.body.startswith(b"data: 1\n\n")
    assert json.loads(told.body.split(b"data: ")[2])["error"]["code"] == "target_lost"
    assert told.body.endswith(b"data: [DONE]\n\n")
    assert told.is_whole


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: stream(b"data: 1\n\n", broken()),
        lambda request: httpx2.Response(200, headers={"Content-Length": "9"}, stream=Parts(b"{", broken())),
    ],
)
def test_an_answer_that_breaks_off_is_not_counted_as_its_status(
    answer: Answer, caplog: pytest.LogCaptureFixture
):
    fleet = Fleet("a", access_log=True)
    fleet.answers["a"] = answer
    with caplog.at_level(logging.INFO, logger="foreword.access"):
        run(fleet.ask())
    assert fleet.counted() == {"broken": 1.0}
    assert " /v1/completions broken " in caplog.records[-1].getMessage()


def test_an_answer_whose_client_leaves_is_not_counted_as_its_status(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        leaving = asyncio.Event()

        class Endless(Parts):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                yield b"data: 1\n\n"
                leaving.set()
                await asyncio.Event().wait()

        fleet = Fleet("a", access_log=True)
        fleet.answers["a"] = lambda request: httpx2.Response(200, stream=Endless())
        await fleet.ask(leaving=leaving)
        assert fleet.counted() == {"aborted": 1.0}

    with caplog.at_level(logging.INFO, logger="foreword.access"):
        run(main())
    assert " /v1/completions aborted " in caplog.records[-1].getMessage()


def test_a_whole_answer_is_counted_by_its_status():
    fleet = Fleet("a")
    run(fleet.ask())
    assert fleet.counted() == {"200": 1.0}


def test_a_body_that_breaks_off_is_not_ended_as_if_it_were_whole():
    fleet = Fleet("a", "b")
    fleet.answers["a"] = lambda request: httpx2.Response(
        200, headers={"Content-Length": "99"}, stream=Parts(b"{", broken())
    )
    told = run(fleet.ask())
    assert (fleet.asked, told.body, told.is_whole) == (["a"], b"{", False)


def test_if_all_are_full_the_last_refusal_is_passed_on_and_if_none_is_there_one_line():
    fleet = Fleet("a", "b")
    for name in "ab":
        fleet.answers[name] = lambda request: said(
            429, {"error": {"message": "full"}}, **{"Retry-After": "3"}
        )
    told = run(fleet.ask())
    assert (told.status, told.headers["retry-after"]) == (429, "3")
    assert json.loads(told.body)["error"]["message"] == "full"
    for target in fleet.targets:
        target.mark_unavailable("down")
    told = run(fleet.ask())
    assert (told.status, told.headers["retry-after"]) == (503, "1")
    assert (
        json.loads(told.body)["error"]["message"]
        == "none of the router's 2 targets accepts requests; try again"
    )


def test_a_client_that_leaves_ends_its_request_at_the_target():
    fleet, leaving, parts = Fleet("a"), asyncio.Event(), []

    class Endless(Parts):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            leaving.set()
            await asyncio.Event().wait()

    def answer(request: httpx2.Request) -> httpx2.Response:
        parts.append(Endless())
        return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, stream=parts[0])

    fleet.answers["a"] = answer
    told = run(fleet.ask(leaving=leaving))
    assert (told.body, told.is_whole, parts[0].closed) == (b"data: 1\n\n", False, True)
    assert (fleet.target("a").in_flight, fleet.admission.in_flight) == (0, 0)


def test_what_is_passed_on_and_what_is_not():
    fleet = Fleet("a", keys=("secret",))
    assert run(fleet.ask(key="wrong")).status == 401
    for path, method in (("/speculation", "GET"), ("/learn", "POST"), ("/learn/tenants/me", "DELETE")):
        told = run(fleet.ask(key="secret", path=path, method=method))
        assert told.status == 404, path
        assert f"{path} concerns a single target" in told.body.decode()
    assert run(fleet.ask(key="secret", path="/nothing")).status == 404
    assert not fleet.asked
    headers = {"x-request-id": "mine", "connection": "close", "accept-encoding": "identity"}
    told = run(fleet.ask(key="secret", headers=headers))
    (seen,) = fleet.seen
    assert (seen.headers["authorization"], seen.headers["host"]) == ("Bearer secret", "a:1")
    assert (seen.headers["x-request-id"], told.headers["x-request-id"]) == ("mine", "mine")
    assert json.loads(seen.content) == {"prompt": "hello"}
    fleet.answers["a"] = lambda request: said(200, {"data": []})
    told = run(call(fleet.app, "/v1/models", {"authorization": "Bearer secret"}, method="GET"))
    assert json.loads(told.body) == {"data": []}


def test_the_router_tells_its_own_version():
    fleet = Fleet("a")
    told = run(call(fleet.app, "/version", {}, method="GET"))
    assert json.loads(told.body) == {"version": __version__}
    assert not fleet.asked


def test_a_router_that_stops_takes_nothing_new():
    fleet = Fleet("a")
    fleet.admission.close()
    assert run(fleet.ask()).status == 503
    assert not fleet.asked


def test_targets_are_used_when_they_say_that_they_are_ready():
    fleet = Fleet("a", "b", "c")
    fleet.answers["b"] = lambda request: said(503, {"status": "draining"})
    fleet.answers["c"] = refusing

    def ready(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/ready":
            return said(200, {"status": "ready"})
        assert request.headers["authorization"] == "Bearer key"
        return said(200, {"status": "ok", "engine": {"running": 3, "waiting": 4}})

    fleet.answers["a"] = ready
    run(TargetWatch(fleet.targets, fleet.client, "key").poll())
    assert [target.state for target in fleet.targets] == ["ready", "draining", "down"]
    assert fleet.target("a").load == 7
    told = run(call(fleet.app, "/health", {}, method="GET"))
    assert [one["state"] for one in json.loads(told.body)["targets"]] == ["ready", "draining", "down"]
    assert run(call(fleet.app, "/ready", {}, method="GET")).status == 200


def test_a_list_in_a_file_is_read_again(tmp_path: Any):
    path = tmp_path / "targets"
    path.write_text("a:1\n")
    targets = Targets(f"@{path}")
    (first,) = targets
    first.mark_ready(0)
    path.write_text("a:1\nb:1\n")
    targets.reload()
    assert [target.url for target in targets] == ["http://a:1", "http://b:1"]
    assert next(iter(targets)) is first
    path.unlink()
    targets.reload()
    assert len(list(targets)) == 2


@pytest.mark.parametrize("text", ["", "nowhere", "a:b", "http://a:1/v1", "http://me:secret@a:1", "ftp://a:1"])
def test_what_is_no_target_is_refused(text: str):
    with pytest.raises(RequestError, match="target"):
        Targets(text)


def test_prompts_are_read_in_the_order_of_their_parts():
    chat = {"model": "m", "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "a"}]}
    other = {**chat, "messages": [*chat["messages"][:1], {"role": "user", "content": "b"}]}
    memory = PrefixMemory()
    one, two = (memory.keys(b"", prefix_text(json.dumps(body).encode())) for body in (chat, other))
    assert one.keys == two.keys
    assert len(one.keys) == len(LONG) // BLOCK
    assert prefix_text(b"[") == prefix_text(b"[]") == prefix_text(b"{}") == ""
    adapter = prefix_text(json.dumps({**chat, "model": "adapter"}).encode())
    assert memory.keys(b"", adapter).keys != one.keys
