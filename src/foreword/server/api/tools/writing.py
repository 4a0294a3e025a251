"""Texts and calls of an answer in OpenAI's form."""

from msgspec import UNSET

from foreword.server.api.identity import new_id
from foreword.server.api.tools.asking import ToolUse
from foreword.server.api.tools.events import Called, Event, Given, Said
from foreword.server.api.types.answer_types import CalledTool, ToolCall


class ToolWriter:
    """One answer, as it grows or as a whole."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._reader = use.reader()

    def feed(self, text: str, is_end: bool) -> tuple[str, list[ToolCall]]:
        """What the answer has gained: text, and parts of calls, one for each call."""
        events = self._reader.feed(text)
        if is_end:
            events += self._reader.finish()
        return _said(events), _parts(events)

    def whole(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """All of an answer: text, None if it has only calls, and the calls."""
        events = [*self._reader.feed(text), *self._reader.finish()]
        calls = _parts(events)
        for call in calls:
            call.index = UNSET
        has_calls = bool(calls) or self._use.choice == "required"
        return _said(events).strip() or None if has_calls else _said(events), calls

    def finish_reason(self, reason: str | None) -> str | None:
        """A call that the model chose to make, or had to make some of, is the reason; one that was named is not, and
        one that a stop text cut is none."""
        reader = self._reader
        ended = reason == "stop" and reader.count > 0 and not reader.is_cut and not self._use.is_named
        return "tool_calls" if ended else reason


def _said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Said))


def _parts(events: list[Event]) -> list[ToolCall]:
    parts: dict[int, ToolCall] = {}
    for event in events:
        if isinstance(event, Called):
            called = CalledTool(event.name, "")
            parts[event.index] = ToolCall(called, new_id("call"), "function", event.index)
        elif isinstance(event, Given):
            part = parts.setdefault(event.index, ToolCall(CalledTool(), index=event.index))
            before = part.function.arguments
            part.function.arguments = (before if isinstance(before, str) else "") + event.text
    return list(parts.values())
