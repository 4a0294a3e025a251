"""`POST /v1/responses`: one answer as a list of items, or a stream of named events."""

from collections.abc import Iterable, Sequence
from time import time
from typing import Any

from foreword.engine.messages import AnswerDelta, NewRequest, RequestStats
from foreword.engine.outputs import Answer, Costs
from foreword.server.api.answer_types import ToolCall, new_id
from foreword.server.api.answering import AnswerJob
from foreword.server.api.conversation import Conversation
from foreword.server.api.entry import AnswerRoute
from foreword.server.api.request_types import ResponsesRequest
from foreword.server.api.response_items import responses_tool_choice
from foreword.server.context import ServerContext
from foreword.server.middleware import ApiCaller

Item = dict[str, Any]

REASONING, TEXT = "reasoning_text", "output_text"
"""Types of the content parts of items."""


async def responses_job(context: ServerContext, body: ResponsesRequest, caller: ApiCaller) -> AnswerJob:
    conversation = await Conversation.of(context, body, body.messages())
    request = await conversation.request(context, body, caller, new_id("resp"))
    return AnswerJob([request], ResponsesDialect(context, body, request, conversation), bool(body.stream))


RESPONSES = AnswerRoute(ResponsesRequest, responses_job)


class ResponsesDialect:
    """Format of `/v1/responses`."""

    def __init__(
        self, context: ServerContext, body: ResponsesRequest, request: NewRequest, conversation: Conversation
    ) -> None:
        self._body, self._settings = body, context.settings
        self._id, self._max_tokens = request.request_id, request.params.max_tokens
        self._created = int(time())
        self._reader = conversation.reader()
        self._costs = Costs(1)
        self._event_count = 0
        # Items in order. The key of a text item is the type of its part; that of a call is its index.
        self._items: dict[str | int, Item] = {}
        self._finish_reason: str | None = None

    def opening(self) -> Iterable[Item]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def chunk(self, choice: int, delta: AnswerDelta) -> list[Item]:
        """Return events for new text, new calls and more of their arguments."""
        self._costs.note(delta)
        self._finish_reason = delta.finish_reason
        part = self._reader.feed(delta.text, delta.finish_reason is not None)
        events = self._text_events(REASONING, part.reasoning) + self._text_events(TEXT, part.text or "")
        for call in part.calls:
            events += self._call_events(call)
        return events

    def closing(self) -> Iterable[Item]:
        if not self._items:
            yield from self._new_text_events(TEXT)
        for key, status in zip(self._items, self._item_statuses(), strict=True):
            yield from self._done_events(key, status)
        ended = self._response(self._status, self._costs.total())
        kind = "response.completed" if self._status == "completed" else "response.incomplete"
        yield self._event(kind, response=ended)

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Item:
        answer = answers[0]
        self._finish_reason = answer.last.finish_reason
        part = self._reader.whole(answer.text)
        if part.reasoning:
            self._add_text_item(REASONING)["content"][0]["text"] = part.reasoning
        if part.text or not (part.reasoning or part.calls):
            self._add_text_item(TEXT)["content"][0]["text"] = part.text or ""
        for index, call in enumerate(part.calls):
            self._add_call_item(index, call)["arguments"] = call.function.arguments
        for item, status in zip(self._items.values(), self._item_statuses(), strict=True):
            item["status"] = status
        return self._response(self._status, costs.total())

    @property
    def _status(self) -> str:
        return "completed" if self._finish_reason == "stop" else "incomplete"

    def _item_statuses(self) -> list[str]:
        """Return the status of each item: only the last one can be incomplete."""
        return ["completed"] * (len(self._items) - 1) + [self._status]

    def _event(self, kind: str, **fields: object) -> Item:
        self._event_count += 1
        return {"type": kind, "sequence_number": self._event_count - 1, **fields}

    def _text_events(self, kind: str, text: str) -> list[Item]:
        """Append text to the item of this type, which is added if necessary; return the events."""
        if not text:
            return []
        events = [] if kind in self._items else self._new_text_events(kind)
        self._items[kind]["content"][0]["text"] += text
        fields = self._item_fields(kind) | _logprob_fields(kind)
        events.append(self._event(f"response.{kind}.delta", **fields, delta=text))
        return events

    def _new_text_events(self, kind: str) -> list[Item]:
        """Add an item of this type; return the events."""
        item = self._add_text_item(kind)
        added = self._added_event(kind, {**item, "content": []})
        part = dict(item["content"][0])
        return [added, self._event("response.content_part.added", **self._item_fields(kind), part=part)]

    def _call_events(self, call: ToolCall) -> list[Item]:
        """Append the new part of a call to its item, which is added if necessary; return the events."""
        events: list[Item] = []
        index = call.index if isinstance(call.index, int) else 0
        if index not in self._items:
            events.append(self._added_event(index, dict(self._add_call_item(index, call))))
        if new_arguments := call.function.arguments:
            self._items[index]["arguments"] += new_arguments
            fields = self._item_fields(index)
            events.append(
                self._event("response.function_call_arguments.delta", **fields, delta=new_arguments)
            )
        return events

    def _added_event(self, key: str | int, item: Item) -> Item:
        index = self._item_fields(key)["output_index"]
        return self._event("response.output_item.added", output_index=index, item=item)

    def _done_events(self, key: str | int, status: str) -> Iterable[Item]:
        """Set an item's status, and yield the events of its end."""
        item, fields = self._items[key], self._item_fields(key)
        item["status"] = status
        if isinstance(key, str):
            part = item["content"][0]
            yield self._event(f"response.{key}.done", **fields, text=part["text"], **_logprob_fields(key))
            yield self._event("response.content_part.done", **fields, part=part)
        else:
            called = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **fields, **called)
        yield self._event("response.output_item.done", output_index=fields["output_index"], item=item)

    def _add_text_item(self, kind: str) -> Item:
        """Add an item with an empty part of this type, and return it."""
        fields: Item = {"type": "reasoning", "id": new_id("rs"), "summary": []}
        part: Item = {"type": kind, "text": "", **_logprob_fields(kind)}
        if kind == TEXT:
            fields = {"type": "message", "id": new_id("msg"), "role": "assistant"}
            part["annotations"] = []
        self._items[kind] = {**fields, "status": "in_progress", "content": [part]}
        return self._items[kind]

    def _add_call_item(self, index: int, call: ToolCall) -> Item:
        """Add an item for a call, without arguments, and return it."""
        named = {"call_id": call.id, "name": call.function.name, "arguments": "", "status": "in_progress"}
        self._items[index] = {"type": "function_call", "id": new_id("fc"), **named}
        return self._items[index]

    def _item_fields(self, key: str | int) -> Item:
        """Return the fields of an event that identify an item, and the only part of a text item."""
        fields = {"item_id": self._items[key]["id"], "output_index": list(self._items).index(key)}
        return fields | ({"content_index": 0} if isinstance(key, str) else {})

    def _response(self, status: str, stats: RequestStats | None = None) -> Item:
        body = self._body
        reason = "max_output_tokens" if self._finish_reason == "length" else self._finish_reason
        incomplete = {"reason": reason} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": self._max_tokens,
            "metadata": body.metadata or {},
            "model": body.model or self._settings.model_name,
            "output": list(self._items.values()) if stats is not None else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "tool_choice": responses_tool_choice(body.tool_choice),
            "tools": [{"type": "function", **tool.function.for_template()} for tool in body.tools or ()],
            "top_p": body.top_p,
            "store": False,
            "usage": None if stats is None else _usage(stats),
        }


def _logprob_fields(kind: str) -> Item:
    """Return the field `logprobs`, which text parts have and reasoning parts do not."""
    return {"logprobs": []} if kind == TEXT else {}


def _usage(stats: RequestStats) -> Item:
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens},
        "output_tokens": stats.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.prompt_tokens + stats.output_tokens,
    }
