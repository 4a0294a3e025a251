"""`POST /v1/responses`: one answer as a list of items, or a stream of named events."""

from collections.abc import Iterable, Sequence
from time import time
from typing import Any

from msgspec import UNSET

from foreword.engine.messages import AnswerDelta, NewRequest, RequestStats
from foreword.engine.outputs import Answer, Costs
from foreword.server.api.answer_types import ToolCall, new_id
from foreword.server.api.answering import AnswerJob
from foreword.server.api.conversation import Conversation
from foreword.server.api.entry import AnswerRoute
from foreword.server.api.message_types import written_choice
from foreword.server.api.request_types import ResponsesRequest
from foreword.server.context import ServerContext
from foreword.server.middleware import ApiCaller

Item = dict[str, Any]

REASONING, TEXT = "reasoning_text", "output_text"
"""Types of parts."""


async def responses_job(context: ServerContext, body: ResponsesRequest, caller: ApiCaller) -> AnswerJob:
    """Apply the chat template to the items and create the job."""
    conversation = await Conversation.of(context, body, body.messages())
    request = await conversation.request(context, body, caller, new_id("resp"))
    return AnswerJob([request], ResponsesDialect(context, body, request, conversation), bool(body.stream))


RESPONSES = AnswerRoute(ResponsesRequest, responses_job)


class ResponsesDialect:
    """Format of `/v1/responses`."""

    def __init__(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        request: NewRequest,
        conversation: Conversation,
    ) -> None:
        self._body, self._settings = body, context.settings
        self._id, self._max_tokens = request.request_id, request.params.max_tokens
        self._created = int(time())
        self._reader = conversation.reader()
        self._costs = Costs(1)
        self._count = 0  # number of events
        self._items: list[Item] = []  # in order of creation
        self._texts: dict[str, Item] = {}  # reasoning and text items by part type
        self._calls: dict[int, Item] = {}
        self._reason: str | None = None

    def opening(self) -> Iterable[Item]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def chunk(self, choice: int, delta: AnswerDelta) -> list[Item]:
        """Return events for new text, new calls and more of their arguments."""
        self._costs.note(delta)
        self._reason = delta.finish_reason
        read = self._reader.feed(delta.text, delta.finish_reason is not None)
        events = self._text_events(REASONING, read.reasoning) + self._text_events(TEXT, read.text or "")
        for call in read.calls:
            events += self._call_events(call)
        return events

    def closing(self) -> Iterable[Item]:
        for item in self._items:
            yield from self._done_events(item)
        ended = self._response(self._status, self._costs.total())
        kind = "response.completed" if self._status == "completed" else "response.incomplete"
        yield self._event(kind, response=ended)

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Item:
        answer = answers[0]
        self._reason = answer.last.finish_reason
        read = self._reader.whole(answer.text)
        if read.reasoning:
            self._begin_text(REASONING)["content"][0]["text"] = read.reasoning
        if read.text or not (read.reasoning or read.calls):
            self._begin_text(TEXT)["content"][0]["text"] = read.text or ""
        for call in read.calls:
            self._begin_call(call)["arguments"] = call.function.arguments
        for item in self._items:
            item["status"] = self._status
        return self._response(self._status, costs.total())

    @property
    def _status(self) -> str:
        return "completed" if self._reason == "stop" else "incomplete"

    def _event(self, kind: str, **fields: object) -> Item:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    def _text_events(self, kind: str, text: str) -> list[Item]:
        """Return events for more text of one part type."""
        if not text:
            return []
        events: list[Item] = []
        item = self._texts.get(kind)
        if item is None:
            item = self._begin_text(kind)
            place, part = self._place(item), dict(item["content"][0])
            added = {"output_index": place["output_index"], "item": {**item, "content": []}}
            events.append(self._event("response.output_item.added", **added))
            events.append(self._event("response.content_part.added", **place, part=part))
        item["content"][0]["text"] += text
        events.append(self._event(f"response.{kind}.delta", **self._place(item), delta=text, **_listed(kind)))
        return events

    def _call_events(self, call: ToolCall) -> list[Item]:
        events: list[Item] = []
        number = call.index if isinstance(call.index, int) else 0
        item = self._calls.get(number)
        if item is None:
            item = self._begin_call(call)
            index = self._items.index(item)
            events.append(self._event("response.output_item.added", output_index=index, item=dict(item)))
        more = call.function.arguments
        if isinstance(more, str) and more:
            item["arguments"] += more
            place = {"item_id": item["id"], "output_index": self._items.index(item)}
            events.append(self._event("response.function_call_arguments.delta", **place, delta=more))
        return events

    def _done_events(self, item: Item) -> Iterable[Item]:
        item["status"] = self._status
        index = self._items.index(item)
        if item["type"] != "function_call":
            place, part = self._place(item), item["content"][0]
            kind = part["type"]
            yield self._event(f"response.{kind}.done", **place, text=part["text"], **_listed(kind))
            yield self._event("response.content_part.done", **place, part=part)
        else:
            place = {"item_id": item["id"], "output_index": index}
            yield self._event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _begin_text(self, kind: str) -> Item:
        own: Item = {"type": "reasoning", "id": new_id("rs"), "summary": []}
        part: Item = {"type": kind, "text": "", **_listed(kind)}
        if kind == TEXT:
            own, part = (
                {"type": "message", "id": new_id("msg"), "role": "assistant"},
                {**part, "annotations": []},
            )
        self._texts[kind] = {**own, "status": "in_progress", "content": [part]}
        self._items.append(self._texts[kind])
        return self._texts[kind]

    def _begin_call(self, call: ToolCall) -> Item:
        item: Item = {
            "type": "function_call",
            "id": new_id("fc"),
            "call_id": call.id,
            "name": call.function.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._items.append(item)
        self._calls[call.index if call.index is not UNSET else len(self._calls)] = item
        return item

    def _place(self, item: Item) -> Item:
        return {"item_id": item["id"], "output_index": self._items.index(item), "content_index": 0}

    def _response(self, status: str, stats: RequestStats | None = None) -> Item:
        body = self._body
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
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
            "output": self._items if stats is not None else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "tool_choice": written_choice(body.tool_choice),
            "tools": [{"type": "function", **tool.function.for_template()} for tool in body.tools or ()],
            "top_p": body.top_p,
            "store": False,
            "usage": None if stats is None else _usage(stats),
        }


def _listed(kind: str) -> Item:
    """Return fields that text parts have and reasoning parts do not."""
    return {"logprobs": []} if kind == TEXT else {}


def _usage(stats: RequestStats) -> Item:
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens},
        "output_tokens": stats.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.prompt_tokens + stats.output_tokens,
    }
