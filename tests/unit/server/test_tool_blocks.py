"""Calls that are no JSON objects are read when they are whole, wherever the answer is cut into deltas."""

import json
import random

import pytest

from foreword.server.api.call_format import ArgumentsDelta, CallStart, TextDelta
from foreword.server.api.conversation import Conversation, ToolUse
from foreword.server.api.message_types import ToolFunction
from foreword.server.api.tool_blocks import BLOCK_FORMATS, FORMATS, format_of

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
}
TOOLS = {"weather": SCHEMA, "now": {"type": "object", "properties": {}}}
CALLS = [
    ("weather", {"city": "San José, 7", "days": 3, "tags": ["a", "ü"]}),
    ("now", {}),
    ("weather", {"city": "12"}),
]

WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Oslo", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Oslo", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "pythonic": "[weather(city='Oslo', days=3)]",
}
WRITTEN |= {
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "olmo3": "<function_calls>weather(city='Oslo', days=3)</function_calls>",
    "glm47": WRITTEN["glm45"].replace("\n", ""),
    "llama4_pythonic": WRITTEN["pythonic"],
} | dict.fromkeys(("qwen3_xml", "mimo", "step3p5"), WRITTEN["qwen3_coder"])


def read(name: str, pieces: list[str], most: int | None = None) -> tuple[str, list[tuple[str, object]]]:
    reader = BLOCK_FORMATS[name].reader(TOOLS, max_calls=most)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
    said = "".join(event.text for event in events if isinstance(event, TextDelta))
    names = [event.name for event in events if isinstance(event, CallStart)]
    given = {event.index: event.text for event in events if isinstance(event, ArgumentsDelta)}
    return said, [(name, json.loads(given[number])) for number, name in enumerate(names)]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_what_is_known_of_a_models_calls_is_read(name: str):
    expected = ("", [("weather", {"city": "Oslo", "days": 3})])
    assert read(name, [WRITTEN[name]]) == expected
    assert read(name, list(WRITTEN[name])) == expected


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_calls_that_were_written_are_read_again(name: str):
    written = BLOCK_FORMATS[name].format_calls(CALLS)
    text = written if name.endswith("pythonic") else f"I look. \n{written}\nDone"
    said = "" if name.endswith("pythonic") else "I look. \nDone"
    rng = random.Random(name)
    for _ in range(30):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(name, pieces) == (said, CALLS)
    assert read(name, [text], most=1) == (said, CALLS[:1])


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_what_is_no_call_of_these_tools_is_text(name: str):
    form = BLOCK_FORMATS[name]
    for text in (
        "plain text, [1] and <tool",
        form.format_calls([("other", {"a": 1})]),
        f"{form.begin}nonsense{form.end} after",
        f"{form.begin}[weather(",
        WRITTEN[name][:-12] if form.end else WRITTEN[name][:-3],
        " ",
        "",
    ):
        said, calls = read(name, list(text))
        assert calls == []
        assert said == text


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_the_reason_of_the_end_and_calls_that_a_grammar_requires(name: str):
    function = ToolFunction(name="weather", parameters=SCHEMA)
    writer = Conversation([], ToolUse(BLOCK_FORMATS[name], [function])).reader()
    assert writer.whole(WRITTEN[name]).text is None
    assert writer.finish_reason("stop") == "tool_calls"
    required = ToolUse(BLOCK_FORMATS[name], [function], "required")
    assert required.structured(None) == FORMATS["hermes"].required_grammar(
        [("weather", function.argument_schema)], None
    )
    written = FORMATS["hermes"].format_calls([("weather", {"city": "Oslo"})])
    (call,) = Conversation([], required).reader().whole(written).calls
    assert call.function.arguments == '{"city": "Oslo"}'


def test_templates_teach_their_formats():
    taught = {
        "<tool_call>\n<function=": "qwen3_coder",
        "<tool_call>{name}<arg_key>": "glm45",
        "<｜tool▁calls▁begin｜> ```json": "deepseek_v3",
        "<｜tool▁calls▁begin｜>": "deepseek_v31",
        "<|tool_calls_section_begin|>": "kimi_k2",
        "<|tool_call|>": "granite",
        "functools[": "phi4_mini_json",
        "<seed:tool_call>\n<function=": "seed_oss",
        "<minimax:tool_call>": "minimax_m2",
        "<function_calls>": "olmo3",
        "<longcat_tool_call>": "longcat",
    }
    assert {template: format_of(template).name for template in taught} == taught


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss"])
def test_an_argument_may_contain_the_tags_of_its_call(name: str):
    written = WRITTEN[name].replace("Oslo", "a </function> b")
    expected = [("weather", {"city": "a </function> b", "days": 3})]
    assert read(name, [written]) == ("", expected)


def test_python_calls_may_have_constants_as_json_writes_them():
    written = "<function_calls>weather(city='x', days=null, tags=[true, false])</function_calls>"
    assert read("olmo3", [written]) == ("", [("weather", {"city": "x", "days": None, "tags": [True, False]})])


@pytest.mark.parametrize("given", ["{1, 2}", "b'x'", "{[1]: 2}", "1e999"])
def test_python_values_that_json_has_not_are_text(given: str):
    for written in (f"[weather(city={given})]", "[weather(**{'city': 1})]"):
        assert read("pythonic", [written]) == (written, [])


def test_a_repeated_opening_tag_loses_no_call():
    block = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    assert read("qwen3_coder", ["<tool_call>" + block]) == ("", [("now", {})])


@pytest.mark.parametrize("space", ["  ", "\u00a0", "\u3000"])
def test_python_calls_may_be_indented_by_any_space(space: str):
    block = f"<function_calls>\n{space}now()\n</function_calls>"
    assert read("olmo3", [block]) == ("", [("now", {})])
