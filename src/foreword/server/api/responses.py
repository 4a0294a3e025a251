"""`POST /v1/responses`: one answer as a list of items, and a stream of events with names."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import time
from typing import Any

from msgspec import UNSET

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import AnswerDelta, NewRequest, RequestStats
from foreword.engine.outputs import Answer, Costs
from foreword.errors import RequestError
from foreword.server.api.answer_types import ToolCall
from foreword.server.api.answering import AnswerJob
from foreword.server.api.entry import AnswerRoute
from foreword.server.api.identity import ApiCaller, new_id
from foreword.server.api.message_types import written_choice
from foreword.server.api.prompts import room_for_answer
from foreword.server.api.request_types import ResponsesRequest
from foreword.server.api.tool_use import ToolUse, ToolWriter, chosen_format, shown_messages, tool_use
from foreword.server.context import ServerContext
from foreword.server.settings import ServerSettings
from foreword.structured.params import StructuredOutputs

Item = dict[str, Any]


async def responses_job(context: ServerContext, body: ResponsesRequest, caller: ApiCaller) -> AnswerJob:
    """Put the items into the model's template and word the answer."""
    tokenizer, settings = context.prompts.tokenizer, context.settings
    form = chosen_format(settings.tool_call_parser, tokenizer)
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, form)
    ids = await context.prompts.chat(
        shown_messages(body.messages(), use, form, tokenizer.takes_tools),
        tools=use.shown() if use is not None and tokenizer.takes_tools else None,
    )
    engine = context.engine.limits()
    room = room_for_answer(ids, body.max_output_tokens, engine.max_model_len, settings.limits.prompt_tokens)
    params = body.sampling_params(room, None, settings.sampling)
    form_asked = response_form(body, params)
    params = replace(params, structured=form_asked if use is None else use.structured(form_asked))
    request = NewRequest(
        new_id("resp"),
        tuple(ids),
        params,
        caller.tenant,
        context.speculation(body.speculation),
        labels=body.labels(settings.model_name, bool(body.stream)),
    )
    return AnswerJob([request], ResponsesDialect(context, body, request, use), bool(body.stream))


def check_responses(body: ResponsesRequest, settings: ServerSettings) -> int:
    """Refuse what the settings forbid; there is one answer."""
    body.check_limits(settings.limits)
    if body.n not in (None, 1):
        raise RequestError("n: a response is one answer", "n")
    return 1


RESPONSES = AnswerRoute(ResponsesRequest, check_responses, responses_job)


def response_form(body: ResponsesRequest, params: SamplingParams) -> StructuredOutputs | None:
    """Return the response format of `text.format` or of another field; refuse both at once."""
    if body.text is not None and params.structured is not None:
        raise RequestError("text.format and another field both prescribe the answer's form; give one", "text")
    return body.text or params.structured


class ResponsesDialect:
    """The newest of OpenAI's forms."""

    def __init__(
        self, context: ServerContext, body: ResponsesRequest, request: NewRequest, use: ToolUse | None
    ) -> None:
        self._body, self._settings = body, context.settings
        self._id, self._max_tokens = request.request_id, request.params.max_tokens
        self._created = int(time())
        self._writer = None if use is None else ToolWriter(use)
        self._costs = Costs(1)
        self._count = 0  # events so far
        self._items: list[Item] = []  # in the order in which they began
        self._message: Item | None = None  # the text, once there is some
        self._calls: dict[int, Item] = {}
        self._reason: str | None = None

    def opening(self) -> Iterable[Item]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def chunk(self, choice: int, delta: AnswerDelta) -> list[Item]:
        """Events for new text, new calls and more of their arguments."""
        self._costs.note(delta)
        self._reason = delta.finish_reason
        is_end = delta.finish_reason is not None
        text, calls = (delta.text, []) if self._writer is None else self._writer.feed(delta.text, is_end)
        events = self._text_events(text) if text else []
        for call in calls:
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
        text, calls = (answer.text, []) if self._writer is None else self._writer.whole(answer.text)
        if text or not calls:
            self._begin_message()["content"][0]["text"] = text or ""
        for call in calls:
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

    def _text_events(self, text: str) -> list[Item]:
        events: list[Item] = []
        if self._message is None:
            item = self._begin_message()
            place = self._place(item)
            shown = {**item, "content": []}
            events.append(
                self._event("response.output_item.added", output_index=place["output_index"], item=shown)
            )
            events.append(self._event("response.content_part.added", **place, part=_part("")))
        assert self._message is not None
        self._message["content"][0]["text"] += text
        place = self._place(self._message)
        events.append(self._event("response.output_text.delta", **place, delta=text, logprobs=[]))
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
        if item["type"] == "message":
            place, part = self._place(item), item["content"][0]
            yield self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
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

    def _begin_message(self) -> Item:
        self._message = {
            "type": "message",
            "id": new_id("msg"),
            "role": "assistant",
            "status": "in_progress",
            "content": [_part("")],
        }
        self._items.append(self._message)
        return self._message

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
            "tools": [
                {"type": "function", **tool.function.as_template_sees_it()} for tool in body.tools or ()
            ],
            "top_p": body.top_p,
            "store": False,
            "usage": None if stats is None else _usage(stats),
        }


def _part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(stats: RequestStats) -> Item:
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens},
        "output_tokens": stats.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.prompt_tokens + stats.output_tokens,
    }
