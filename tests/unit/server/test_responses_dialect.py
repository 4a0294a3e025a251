"""Events of `/v1/responses` that no model of the tests brings about."""

from types import SimpleNamespace
from typing import Any

from foreword.engine.messages import AnswerDelta
from foreword.server.api.request_types import ResponsesRequest
from foreword.server.api.responses import ResponsesDialect


def test_an_empty_answer_is_streamed_as_an_empty_message():
    nothing = SimpleNamespace(reasoning="", text="", calls=[])
    context: Any = SimpleNamespace(settings=SimpleNamespace(model_name="m"))
    request: Any = SimpleNamespace(request_id="r", params=SimpleNamespace(max_tokens=9))
    reader = SimpleNamespace(feed=lambda text, is_end: nothing)
    conversation: Any = SimpleNamespace(reader=lambda: reader)
    dialect = ResponsesDialect(context, ResponsesRequest(input="hello"), request, conversation)
    assert dialect.chunk(0, AnswerDelta("r", 0, [2], "", finish_reason="stop")) == []
    events = list(dialect.closing())
    assert [event["type"].removeprefix("response.") for event in events] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    (message,) = events[-1]["response"]["output"]
    assert (message["type"], message["status"], message["content"][0]["text"]) == ("message", "completed", "")
