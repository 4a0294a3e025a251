"""Streams as servers send them: cut anywhere, with and without counts, and broken."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.bench.serve.generator import (
    AnswerEvent,
    ContentChunk,
    RequestOutcome,
    ServerReportedError,
    StreamParser,
    parse_event,
)
from foreword.wire.openai_http import EventParser

STREAM = (
    'data: {"a": "ü"}\r\n\r\n: still here\n\nevent: x\nid: 3\ndata:one\ndata: two\n\n'
    "data: [DONE]\n\ndata: cut"
).encode()
EVENTS = ['{"a": "ü"}'.encode(), b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_where_the_network_cuts(places: list[int]):
    parser = EventParser()
    bounds = [0, *sorted(places), len(STREAM)]
    parts = [STREAM[a:b] for a, b in pairwise(bounds)]
    assert [event for part in parts for event in parser.feed(part)] == EVENTS


def test_what_is_no_event_stream_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="not a line"):
        list(EventParser().feed(b"<html>\n"))
    monkeypatch.setattr(EventParser, "MOST_BYTES", 100)
    parser = EventParser()
    with pytest.raises(ValueError, match="more than 100 bytes"):
        for _ in range(20):
            list(parser.feed(b"data:\n"))


def test_content_and_counts_are_found_where_servers_put_them():
    def chunk(choice: dict[str, Any]) -> AnswerEvent:
        return parse_event(json.dumps({"choices": [choice]}).encode())

    assert chunk({"text": "a"}) == AnswerEvent(True, True)
    assert chunk({"delta": {"content": "a"}}) == AnswerEvent(True, True)
    assert chunk({"delta": {"reasoning_content": "hm"}}) == AnswerEvent(True, True)
    assert chunk({"delta": {"role": "assistant", "content": ""}}) == AnswerEvent(True, False)
    assert chunk({"text": "", "finish_reason": "stop"}) == AnswerEvent(True, False, finish_reason="stop")
    assert chunk({"text": "ab", "token_ids": [1, 2]}).tokens == 2
    assert chunk({"text": "ab", "logprobs": {"tokens": ["a", "b"]}}).tokens == 2
    assert chunk({"delta": {"content": "ab"}, "logprobs": {"content": [{}, {}, {}]}}).tokens == 3
    usage = b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}'
    assert parse_event(usage) == AnswerEvent(prompt_tokens=3, output_tokens=4)
    assert parse_event(b'{"choices": []}') == AnswerEvent()
    strange = b'{"choices": [], "usage": {"prompt_tokens": -3, "completion_tokens": true}}'
    assert parse_event(strange) == AnswerEvent()


@pytest.mark.parametrize("data", ["{", "[]", "3", "{}", '{"choices": 3}', '{"choices": [4]}', "[" * 100_000])
def test_an_event_that_is_no_chunk_is_refused(data: str):
    with pytest.raises(ValueError, match=r"event|choice"):
        parse_event(data.encode())


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "out of pages"}},
        {"error": "out of pages"},
        {"choices": [{"text": "", "finish_reason": "error"}]},
    ],
)
def test_an_error_in_the_stream_is_one(event: dict[str, Any]):
    with pytest.raises(ServerReportedError, match=r"out of pages|error"):
        parse_event(json.dumps(event).encode())


def read(*events: tuple[float, dict[str, Any]]) -> RequestOutcome:
    outcome = RequestOutcome(due=0.0)
    parser = StreamParser(outcome)
    for time, event in events:
        assert not parser.is_finished
        parser.feed(f"data: {json.dumps(event)}\n\n".encode(), time)
    parser.feed(b"data: [DONE]\n\n", 99.0)
    assert parser.is_finished
    return outcome


def said(text: str, tokens: int | None = None, used: int | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": text}
    if tokens is not None:
        choice["token_ids"] = [0] * tokens
    usage = {} if used is None else {"usage": {"completion_tokens": used}}
    return {"choices": [choice], **usage}


def test_times_are_of_chunks_with_text_and_the_end_is_the_last_part_of_the_answer():
    end = {"choices": [{"text": "", "finish_reason": "stop"}]}
    outcome = read((1.0, said("")), (2.0, said("a")), (3.0, said("b")), (4.0, end))
    assert outcome.chunks == [ContentChunk(2.0, None), ContentChunk(3.0, None)]
    assert outcome.last_event_time == 4.0
    assert outcome.usage_tokens is None


def test_a_stream_of_only_a_role_has_no_answer():
    outcome = read((1.0, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    assert (outcome.chunks, outcome.last_event_time) == ([], None)


def test_tokens_whose_text_comes_later_are_counted_with_it():
    outcome = read((1.0, said("a", 1)), (2.0, said("", 2)), (3.0, said("b", 1)), (4.0, said("", 1)))
    assert outcome.chunks == [ContentChunk(1.0, 1), ContentChunk(3.0, 3)]


def test_usage_with_every_chunk_tells_what_each_holds():
    last = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 6}}
    outcome = read((1.0, said("a", used=1)), (2.0, said("b", used=5)), (3.0, said("c", used=6)), (9.0, last))
    assert [chunk.tokens for chunk in outcome.chunks] == [1, 4, 1]
    assert (outcome.usage_tokens, outcome.prompt_tokens, outcome.last_event_time) == (6, 7, 3.0)


def test_events_of_one_arrival_have_its_time():
    outcome = RequestOutcome(due=0.0)
    event = json.dumps(said("a"))
    StreamParser(outcome).feed(f"data: {event}\n\ndata: {event}\n\n".encode(), 5.0)
    assert [chunk.time for chunk in outcome.chunks] == [5.0, 5.0]
