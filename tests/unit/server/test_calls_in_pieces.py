"""Answers with tool calls in Anthropic's and Ollama's formats, streamed in pieces cut anywhere."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import AnswerDelta, NewRequest, RequestStats
from foreword.engine.outputs import Answer, Costs
from foreword.server.api.answering import AnswerJob
from foreword.server.api.anthropic import MessagesDialect
from foreword.server.api.chat import ChatDialect
from foreword.server.api.conversation import Conversation, ToolUse
from foreword.server.api.message_types import ToolFunction
from foreword.server.api.ollama_answers import OllamaDialect
from foreword.server.api.request_types import ChatRequest
from foreword.server.api.tool_blocks import FORMATS
from foreword.server.settings import ServerSettings

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": {"n": 2}}}\n</tool_call>'
BARE = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
CUT = 'So.<tool_call>\n{"name": "weather", "arguments": {"city": "Bo'
ANSWERS = [f"{{Hi {CALL}", f"Sure. {CALL}\n{BARE} Done.", CUT]

Said = tuple[str, list[tuple[str, Any]], str]  # text, calls and why the answer ended


def job() -> AnswerJob:
    body = ChatRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "stream_options": {"include_usage": True},
        }
    )
    request = NewRequest("r", (1, 2), SamplingParams())
    use = ToolUse(FORMATS["hermes"], [ToolFunction(name="weather", parameters={"type": "object"})])
    context: Any = SimpleNamespace(settings=ServerSettings("m"), prompts=SimpleNamespace(tokenizer=None))
    return AnswerJob([request], ChatDialect(context, body, request, Conversation([1, 2], use)), True)


def deltas(*pieces: str) -> list[AnswerDelta]:
    begun = [AnswerDelta("r", 0, piece, (5,)) for piece in pieces[:-1]]
    stats = RequestStats(prompt_tokens=2, output_tokens=len(pieces))
    return [*begun, AnswerDelta("r", 0, pieces[-1], (5,), finish_reason="stop", stats=stats)]


def streamed(dialect: MessagesDialect | OllamaDialect, *pieces: str) -> list[dict[str, Any]]:
    new = [event for delta in deltas(*pieces) for event in dialect.chunk(0, delta)]
    return [*dialect.opening(), *new, *dialect.closing()]


def whole(dialect: MessagesDialect | OllamaDialect, text: str) -> dict[str, Any]:
    answer, costs = Answer(0), Costs(1)
    (delta,) = deltas(text)
    answer.take(delta)
    costs.note(delta)
    found: dict[str, Any] = json.loads(json.dumps(dialect.whole([answer], costs)))
    return found


def ollamas(parts: list[dict[str, Any]]) -> Said:
    messages = [part["message"] for part in parts]
    called = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    text = "".join(message["content"] for message in messages)
    return text.strip(), [(call["name"], call["arguments"]) for call in called], parts[-1]["done_reason"]


def anthropics(blocks: list[dict[str, Any]], reason: str) -> Said:
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    return text.strip(), calls, reason


def anthropics_events(events: list[dict[str, Any]]) -> Said:
    """Put the blocks together as Anthropic's clients do."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "partial": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta, block = event["delta"], blocks[-1]
            block["text"] = block.get("text", "") + delta.get("text", "")
            block["partial"] += delta.get("partial_json", "")
    for block in blocks:
        if block["partial"].endswith("}"):
            block["input"] = json.loads(block["partial"])
    return anthropics(blocks, next(e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta"))


@pytest.mark.parametrize("text", ANSWERS)
def test_every_stream_has_the_text_and_calls_of_the_whole_answer(text: str):
    by_ollama = ollamas([whole(OllamaDialect(job(), is_chat=True), text)])
    message = whole(MessagesDialect(job()), text)
    by_anthropic = anthropics(message["content"], message["stop_reason"])
    once = [(text[:cut], text[cut:]) for cut in range(len(text) + 1)]
    twice = [(text[:a], text[a:b], text[b:]) for b in range(len(text) + 1) for a in range(b % 11, b, 11)]
    for pieces in [tuple(text), *once, *twice]:
        assert ollamas(streamed(OllamaDialect(job(), is_chat=True), *pieces)) == by_ollama, pieces
        assert anthropics_events(streamed(MessagesDialect(job()), *pieces)) == by_anthropic, pieces


def test_ollamas_calls_are_sent_when_they_are_complete():
    begun, end = CALL[:-20], CALL[-20:]
    parts = streamed(OllamaDialect(job(), is_chat=True), f"{{Hi {begun}", end, " Done", ".")
    assert [len(part["message"].get("tool_calls", [])) for part in parts][:2] == [0, 1]


def test_anthropics_clients_are_not_told_to_run_a_call_that_ends_early():
    assert whole(MessagesDialect(job()), CALL)["stop_reason"] == "tool_use"
    assert whole(MessagesDialect(job()), CUT)["stop_reason"] == "end_turn"
