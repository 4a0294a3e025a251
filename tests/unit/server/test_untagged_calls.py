"""Calls that a model writes without its tags: read like tagged ones if they fit an offered tool, text otherwise."""

import json

import pytest

from foreword.server.api.call_format import ArgumentsDelta, CallStart, TextDelta
from foreword.server.api.conversation import Conversation, ToolUse
from foreword.server.api.message_types import ToolFunction
from foreword.server.api.tool_reading import FORMATS, ToolReader
from foreword.server.api.untagged_calls import fits_schema

ADD = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}
OPEN = {"type": "object", "properties": {}, "additionalProperties": True}
TOOLS = {"add": ADD, "note": OPEN}
CALL = '{"name": "add", "arguments": {"a": 1, "b": "x`{}"}}'
PRETTY = json.dumps(json.loads(CALL), indent=4)
GIVEN = '{"a": 1, "b": "x`{}"}'


def read(pieces: list[str], form: str = "hermes") -> tuple[str, list[tuple[str, str]]]:
    reader = ToolReader(FORMATS[form], TOOLS)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
    calls = {event.index: (event.name, "") for event in events if isinstance(event, CallStart)}
    for event in events:
        if isinstance(event, ArgumentsDelta):
            calls[event.index] = (calls[event.index][0], calls[event.index][1] + event.text)
    assert list(calls) == list(range(reader.count))
    return "".join(event.text for event in events if isinstance(event, TextDelta)), list(calls.values())


def cut(text: str) -> list[list[str]]:
    """As a whole, by characters, and in twos."""
    return [[text], list(text), [text[place : place + 2] for place in range(0, len(text), 2)]]


FOUND = {
    CALL: ("", 1),
    f"\n {CALL}\n": ("", 1),
    f"{{{CALL}}}": ("", 1),  # as Qwen2.5's templates show calls
    f"```json\n{{{CALL} }}\n```": ("", 1),
    f"```json\n{CALL}\n```": ("", 1),
    f"```\n{CALL}\n```\n": ("", 1),
    f"```json\n{PRETTY}\n```": ("", 1),
    f"```JSON {CALL}```": ("", 1),
    f"````tool_call\n{CALL}\n````": ("", 1),
    f"```json\n{CALL}\n{CALL}\n```": ("", 2),
    f"```json\n[{CALL}, {CALL}]\n```": ("", 2),
    f"[{CALL},\n {CALL}]": ("", 2),
    f"{CALL}\n{CALL}": ("", 2),
    f"{CALL}, {CALL}; {CALL}": ("", 3),
    f"I add.\n{CALL}\nThen I stop.": ("I add.\nThen I stop.", 1),
    f"I add:\n\n  ```json\n  {CALL}\n  ```\nThen I stop.": ("I add:\n\n  Then I stop.", 1),
    f"```json\n{CALL}": ("", 1),  # the model ended without closing it
    f"```python\n{{}}\n```\n{CALL}": ("```python\n{}\n```\n", 1),
    f'<tool_call>{{"name": "other"}}</tool_call>\n{CALL}': (
        '<tool_call>{"name": "other"}</tool_call>\n',
        1,
    ),
    f"`{{` begins an object\n{CALL}": ("`{` begins an object\n", 1),
    f"```json\n```\n{CALL}": ("```json\n```\n", 1),
    f"```json``` is a mark\n{CALL}": ("```json``` is a mark\n", 1),
    f'{{"no": "call"}}\n{CALL}': ('{"no": "call"}\n', 1),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("text", FOUND)
def test_calls_without_tags_are_calls(form: str, text: str):
    said, count = FOUND[text]
    for pieces in cut(text):
        text_found, calls = read(pieces, form)
        assert text_found == said
        assert [(name, json.loads(given)) for name, given in calls] == [("add", json.loads(GIVEN))] * count


@pytest.mark.parametrize(
    ("text", "said", "count"),
    [
        (f"<tool_call>\n{{{CALL}}}\n</tool_call>\n{CALL}", "", 2),
        (f"{{{CALL}", f"{{{CALL}", 0),
        (f"{{{CALL}, 1}}", f"{{{CALL}, 1}}", 0),
        (f"{{{{{CALL}}}}}", f"{{{{{CALL}}}}}", 0),
    ],
)
def test_braces_may_be_doubled_around_one_call(text: str, said: str, count: int):
    for pieces in cut(text):
        text_found, calls = read(pieces)
        assert (text_found, len(calls)) == (said, count)
        assert all(json.loads(given) == json.loads(GIVEN) for _, given in calls)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ('{"name": "add", "parameters": {"a": 1.50}}', '{"a": 1.50}'),
        ('{"type": "function", "name": "add", "parameters": {"a": 2}}', '{"a": 2}'),
        ('{"arguments": {"a": []}, "name": "add"}', '{"a": []}'),
        ('{"name": "add", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', '{"a": "\\n"}'),
        ('<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>', '{"a": 1}'),
        ('<tool_call>\n{"name": "add", "arguments": "1"}\n</tool_call>', '"1"'),
    ],
)
def test_arguments_are_an_object_under_either_key_or_such_an_object_as_text(text: str, given: str):
    for pieces in cut(text):
        assert read(pieces) == ("", [("add", given)])


TEXTS = [
    '{"name": "other", "arguments": {}}',
    '{"name": "add", "arguments": {}}',  # a is required
    '{"name": "add", "arguments": {"a": 1, "c": 2}}',  # c is not known
    '{"name": "add", "arguments": [1]}',
    '{"name": "add", "arguments": "a"}',
    '{"name": "add", "arguments": null}',
    '{"name": "add"}',
    '{"name": "add", "arguments": {"a": 1}, "parameters": {"a": 1}}',
    '{"name": "add", "arguments": {"a": 1}, "id": 3}',
    '{"name": "add", "arguments": {"a": 01}}',
    '{"name": "add", "arguments": {"a": 1',  # cut
    '{"city": "Ulm", "name": "add", "arguments": {"a": 1}}',
    f'{{"calls": [\n{CALL}]}}'.replace("\n", "\n  "),
    '{"type": "object", "name": "add", "arguments": {"a": 1}}',
    f"One writes {CALL}",
    f"`{CALL}`",
    f"```json\n[[{CALL}]]\n```",
    f"```json\n{CALL}]\n```",
    f"```python\n{CALL}\n```",
    f"```python\n\n{CALL}\n```",
    f"````python\n```\n{CALL}\n````",
    f"```json lines\n{CALL}\n```",
    f"```json\n{CALL}\nand more\n```",
    f'```json\n{CALL}\n{{"other": 1}}\n```',
    f"[{CALL}, 1]",
    f"[{CALL}",
    f"```json\n[{CALL}\n```",
    "```json\n```",
    "```json\n[]\n```\n",
    "[]",
    "[a link](there) and [1, 2]\n{} {\n}",
    "a ` b `` c ``` d\n`` e",
]


@pytest.mark.parametrize("text", TEXTS)
def test_everything_else_stays_text_as_it_was_written(text: str):
    for pieces in cut(text):
        assert read(pieces) == (text, [])


def test_text_is_held_back_no_longer_than_it_can_become_a_call():
    reader = ToolReader(FORMATS["hermes"], TOOLS)

    def released(text: str) -> str:
        return "".join(event.text for event in reader.feed(text) if isinstance(event, TextDelta))

    assert released("Look: {") == "Look: {"
    assert released("\n{") == "\n"
    assert released('"name": "ad') == ""
    assert released('der"') == '{"name": "adder"'  # no offered tool begins so
    assert released("\n```js") == "\n"
    assert released("x") == "```jsx"
    assert released("\n```\n") == "\n```\n"
    assert released('```json\n{"a": ') == '```json\n{"a"' + ": "
    assert released("1}\n```\n[") == "1}\n```\n"
    assert released("x") == "[x"


def test_a_name_without_tags_and_its_arguments_come_when_the_call_is_whole():
    reader = ToolReader(FORMATS["hermes"], TOOLS)
    assert reader.feed(CALL[:-1]) == []
    assert reader.feed("}") == [CallStart(0, "add"), ArgumentsDelta(0, GIVEN)]
    assert reader.feed("\n```json\n" + CALL) == []
    assert reader.feed("\n```") == [CallStart(1, "add"), ArgumentsDelta(1, GIVEN)]
    assert reader.finish() == []


def test_the_answer_ends_with_tool_calls_and_says_no_more_of_them_than_wanted():
    use = ToolUse(FORMATS["hermes"], [ToolFunction(name="add", parameters=ADD)], max_calls=1)
    writer = Conversation([], use).reader()
    part = writer.whole(f"I add.\n```json\n{CALL}\n{CALL}\n```")
    assert part.text == "I add."
    assert [(call.function.name, call.function.arguments) for call in part.calls] == [("add", GIVEN)]
    assert writer.finish_reason("stop") == "tool_calls"
    assert writer.finish_reason("length") == "length"


def test_a_schema_says_which_names_arguments_have():
    assert fits_schema(ADD, {"a": 1})
    assert not fits_schema(ADD, {"b": 1})
    assert not fits_schema(ADD, {"a": 1, "c": 1})
    assert not fits_schema(ADD, ["a"])
    assert fits_schema(OPEN, {"c": 1})
    assert fits_schema({"type": "object"}, {"c": 1})
    assert fits_schema({"properties": {}, "patternProperties": {"c": {}}}, {"c": 1})
    assert not fits_schema(ToolFunction(name="now").argument_schema, {"c": 1})
