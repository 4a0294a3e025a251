"""Calls of tools in the words of four families of models, however their text is cut."""

import random

import pytest

from foreword.server.api.call_format import ArgumentsDelta, CallStart, Event, TextDelta
from foreword.server.api.conversation import Conversation, ToolUse
from foreword.server.api.message_types import ToolFunction
from foreword.server.api.tool_blocks import format_of
from foreword.server.api.tool_reading import FORMATS, ToolFormat, ToolReader

TOOLS: dict[str, dict] = {"weather": {}, "add": {}}
WEATHER = ("weather", {"city": 'Pa"ris {', "days": [1, 2]})
ADD = ("add", {"a": 1, "b": {"c": "}"}})


def read(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and the calls with their arguments as they were written."""
    reader = ToolReader(form, TOOLS)
    events: list[Event] = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, ArgumentsDelta):
            calls[event.index][1] += event.text
    assert reader.count == len(calls)
    return text, [(name, given) for name, given in calls]


def cuts(text: str) -> list[list[str]]:
    """As a whole, by characters, and at random."""
    rng = random.Random(text)
    ways = [[text], list(text)]
    for _ in range(4):
        places = sorted(rng.sample(range(1, len(text)), min(5, len(text) - 1))) if len(text) > 1 else []
        ways.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return ways


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_as_they_were_written(name: str):
    form = FORMATS[name]
    several = [WEATHER, ADD] if form.begin or form.is_list else [WEATHER]
    for calls in ([WEATHER], several):
        for pieces in cuts(form.format_calls(calls)):
            text, found = read(form, pieces)
            assert text.strip() == ""
            assert [(n, __import__("json").loads(a)) for n, a in found] == calls


CASES = {
    ("hermes", "Just text with < and <tool and {json: 1}."): (
        "Just text with < and <tool and {json: 1}.",
        [],
    ),
    ("hermes", 'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'): (
        "Let me see. ",
        [("add", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'): ("", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>'): ("", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1'): ("", [("add", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'): (
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        [],
    ),
    ("hermes", "<tool_call>nonsense</tool_call> more"): ("<tool_call>nonsense</tool_call> more", []),
    ("llama3_json", '{"name": "add", "parameters": {"a": [1, 2]}}'): ("", [("add", '{"a": [1, 2]}')]),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {}}'): ("", [("add", "{}")]),
    ("llama3_json", '{"name": "add", "arguments": {"a": 1}}'): ("", [("add", '{"a": 1}')]),
    ("llama3_json", '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"a": 2}}'): (
        "",
        [("add", "{}"), ("add", '{"a": 2}')],
    ),
    ("llama3_json", '{"answer": 5, "x": {"name": "add"}}'): ('{"answer": 5, "x": {"name": "add"}}', []),
    ("llama3_json", "{} is empty"): ("{} is empty", []),
    ("llama3_json", 'I say {"name": "add", "parameters": {}}'): (
        'I say {"name": "add", "parameters": {}}',
        [],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'): ("", [("add", '{"a": 1}')]),
    ("mistral", "[1, 2]"): ("[1, 2]", []),
    ("mistral", "[TOOL_CALL is no mark"): ("[TOOL_CALL is no mark", []),
    (
        "smollm",
        '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]</tool_call>',
    ): (
        "",
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    ("smollm", "Nothing to call"): ("Nothing to call", []),
}


@pytest.mark.parametrize(("case", "expected"), CASES.items(), ids=[" ".join(case)[:60] for case in CASES])
def test_text_stays_text(case: tuple[str, str], expected):
    form, text = case
    for pieces in cuts(text):
        assert read(FORMATS[form], pieces) == expected


def test_the_template_tells_the_format():
    assert format_of("... <tool_call> ...").name == "hermes"
    assert format_of("... [TOOL_CALLS] ...").name == "mistral"
    assert format_of("... <|python_tag|> ...").name == "llama3_json"
    assert format_of("... no tools ...").name == format_of(None).name == "smollm"


WHOLE = FORMATS["hermes"].format_calls([ADD])


@pytest.mark.parametrize(
    ("text", "reason"),
    [(WHOLE, "tool_calls"), (WHOLE[:-12], "tool_calls"), (WHOLE[:50], "stop"), ("no call", "stop")],
)
def test_a_call_that_a_stop_text_cut_is_not_why_an_answer_ended(text: str, reason: str):
    for pieces in cuts(text):
        writer = Conversation([], ToolUse(FORMATS["hermes"], [ToolFunction(name="add")])).reader()
        for place, piece in enumerate(pieces):
            writer.feed(piece, place == len(pieces) - 1)
        assert writer.finish_reason("stop") == reason
        assert writer.finish_reason("length") == "length"


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_cut_of_a_forced_call_is_no_text(name: str):
    written = FORMATS[name].format_calls([ADD])
    for length in range(1, len(written)):
        conversation = Conversation([], ToolUse(FORMATS[name], [ToolFunction(name="add")], "required"))
        assert conversation.reader().feed(written[:length], is_end=True).text == ""
        whole = conversation.reader().whole(written[:length])
        assert whole.text is None
        assert len(whole.calls) <= 1


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\nI will look that up.'),
        ("llama3_json", '{"name": "a", "parameters": {}} I will look that up.'),
        ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}] I will look that up.'),
    ],
)
def test_text_after_a_call_keeps_its_spaces_and_its_first_letter(form: str, text: str):
    reader = ToolReader(FORMATS[form], {"a": {}})
    events = [*reader.feed(text), *reader.finish()]
    assert [event.name for event in events if isinstance(event, CallStart)] == ["a"]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "I will look that up."


def test_space_between_calls_is_not_told_though_text_came_before_them():
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    reader = ToolReader(FORMATS["hermes"], {"a": {}})
    events = [*reader.feed(f"I look.{call}\n{call}\n"), *reader.finish()]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "I look."
    assert reader.count == 2


def test_a_mark_in_prose_after_a_call_swallows_nothing():
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    reader = ToolReader(FORMATS["hermes"], {"a": {}})
    events = [*reader.feed(f"{call} One writes <tool_call> before a call."), *reader.finish()]
    said = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert said == "One writes <tool_call> before a call."


def test_no_more_calls_are_told_than_were_asked_for():
    call = '<tool_call>{"name": "a", "arguments": {"n": 1}}</tool_call>'
    reader = ToolReader(FORMATS["hermes"], {"a": {}}, max_calls=1)
    events = [*reader.feed(2 * call), *reader.finish()]
    assert [event.index for event in events if not isinstance(event, TextDelta)] == [0, 0]
