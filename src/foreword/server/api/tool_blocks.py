"""Tool-call formats that are not JSON objects, with their incremental parser, and the choice of a model's format."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.server.api import tool_reading
from foreword.server.api.tool_reading import (
    ArgumentsDelta,
    CallReader,
    CallStart,
    Event,
    TextDelta,
    ToolFormat,
    merge_events,
    overlap,
)
from foreword.structured.params import StructuredOutputs

Schemas = Mapping[str, Mapping[str, Any]]
Calls = list[tuple[str, Any]]


@dataclass(frozen=True)
class BlockFormat:
    """A format of tool calls: blocks of text between tags. Without tags, an answer with calls has nothing else."""

    name: str
    begin: str  # tag before a block; empty: none
    end: str  # tag after a block; empty: none
    parse: Callable[[str, Schemas], Calls]  # (name, arguments) of a block's calls; ValueError if invalid
    write: Callable[[Sequence[tuple[str, Any]]], str]  # inverse of `parse`, without the tags
    required: ToolFormat  # JSON format of calls that a grammar enforces

    def format_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return calls (name, arguments) as the model would write them."""
        return f"{self.begin}{self.write(calls)}{self.end}"

    def required_grammar(self, tools: Sequence[tuple[str, Any]], max_calls: int | None) -> StructuredOutputs:
        """Return a grammar for at least one call of these tools, and at most `max_calls`."""
        return self.required.required_grammar(tools, max_calls)

    def optional_grammar(self, tools: Sequence[tuple[str, Any]]) -> StructuredOutputs | None:
        """Return None: optional calls of this format are not constrained."""
        return None

    def reader(self, tools: Schemas, only_calls: bool = False, max_calls: int | None = None) -> CallReader:
        if only_calls:
            return self.required.reader(tools, only_calls, max_calls)
        return BlockReader(self, tools, max_calls)


class BlockReader:
    """Incremental parser of a `BlockFormat`; it holds back blocks, and text that may become a tag."""

    def __init__(self, call_format: BlockFormat, tools: Schemas, max_calls: int | None = None) -> None:
        self._format = call_format
        self._tools = tools
        self._max_calls = max_calls
        self._held = ""  # text without events so far
        self._is_inside = False  # `_held` begins with a block
        self._has_text = False  # text besides space was reported after the last call
        self.count = 0

    @property
    def is_cut(self) -> bool:
        return self._is_inside

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return merge_events(events)

    def finish(self) -> list[Event]:
        """End the answer: an incomplete block is text, unless the format has no closing tag."""
        events: list[Event] = []
        held, self._held = self._held, ""
        if self._is_inside and not self._format.end:
            self._end_block(held, held, events)
        else:
            self._add_text(held, events)
        return merge_events(events)

    def _step(self, events: list[Event]) -> bool:
        """Add the events up to the next tag; return False if the held-back text has no tag."""
        call_format, held = self._format, self._held
        if self._is_inside:
            block, found, after = held.partition(call_format.end) if call_format.end else (held, "", "")
            if found:
                self._held = after
                self._end_block(block.removeprefix(call_format.begin), block + found, events)
            return bool(found)
        if not call_format.begin:
            self._is_inside = not self._has_text and held.lstrip().startswith("[")
            if self._is_inside or not held.strip():
                return False
            before, found = held, ""
        else:
            before, found, _ = held.partition(call_format.begin)
            if not found:
                before = held[: len(held) - overlap(held, call_format.begin)]
        self._held = held[len(before) :]
        self._is_inside = bool(found)
        self._add_text(before, events)
        return bool(found)

    def _end_block(self, inside: str, written: str, events: list[Event]) -> None:
        """Add the events of a block's calls; if it has none, `written`, the block with its tags, is text."""
        self._is_inside = False
        try:
            calls = self._format.parse(inside.removeprefix(self._format.begin), self._tools)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            calls = []
        if not calls or any(name not in self._tools for name, _ in calls):
            self._add_text(written, events)
            return
        for name, given in calls:
            if self._max_calls is None or self.count < self._max_calls:
                arguments = json.dumps(given, ensure_ascii=False)
                events += [CallStart(self.count, name), ArgumentsDelta(self.count, arguments)]
                self.count += 1
        self._has_text = False

    def _add_text(self, text: str, events: list[Event]) -> None:
        """Add the event of a text; space around calls is dropped."""
        if not self._has_text:
            text = text.lstrip() if self.count or self._is_inside else text
        self._has_text |= bool(text.strip())
        if text:
            events.append(TextDelta(text))


def _typed_value(text: str, schema: Mapping[str, Any], name: str) -> object:
    """Convert a value written as text to the type in the argument's schema."""
    properties = schema.get("properties")
    known = properties.get(name) if isinstance(properties, Mapping) else None
    kind = known.get("type") if isinstance(known, Mapping) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _argument_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parse_object(text: str) -> object:
    """Parse arguments, which must be a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    return value


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _parse_xml(block: str, tools: Schemas) -> Calls:
    found = _FUNCTION.fullmatch(block)
    if found is None:
        raise ValueError("no function")
    name = found[1].strip()
    schema = tools.get(name, {})
    given = _PARAMETER.findall(found[2])
    return [(name, {key.strip(): _typed_value(text, schema, key.strip()) for key, text in given})]


def _write_xml(calls: Sequence[tuple[str, Any]]) -> str:
    blocks = []
    for name, given in calls:
        pairs = [(key, _argument_text(value)) for key, value in given.items()]
        written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
        blocks.append(f"\n<function={name}>\n{written}</function>\n")
    return "</tool_call>\n<tool_call>".join(blocks)


_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _parse_pairs(block: str, tools: Schemas) -> Calls:
    name = block.strip().partition("\n")[0].partition("<arg_key>")[0].strip()
    schema = tools.get(name, {})
    return [
        (name, {key.strip(): _typed_value(text, schema, key.strip()) for key, text in _PAIR.findall(block)})
    ]


def _write_pairs(calls: Sequence[tuple[str, Any]]) -> str:
    def pairs(given: Mapping[str, Any]) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_argument_text(value)}</arg_value>\n"
            for key, value in given.items()
        )

    return "</tool_call>\n<tool_call>".join(f"{name}\n{pairs(given)}" for name, given in calls)


def _entry_functions(pattern: str, format_entry: Callable[[int, str, str], str]) -> dict[str, Any]:
    """Return `parse` and `write` of a format with one entry per call, which has a name and JSON arguments.

    `pattern` matches an entry, with the groups `name` and `given`; `format_entry` receives (index, name, JSON).
    """
    entry = re.compile(pattern, re.DOTALL)

    def parse(block: str, tools: Schemas) -> Calls:
        return [(found["name"].strip(), _parse_object(found["given"])) for found in entry.finditer(block)]

    def write(calls: Sequence[tuple[str, Any]]) -> str:
        return "".join(format_entry(n, name, json.dumps(given)) for n, (name, given) in enumerate(calls))

    return {"parse": parse, "write": write}


def _parse_python(block: str, tools: Schemas) -> Calls:
    listed = ast.parse(block.strip(), mode="eval").body
    if not isinstance(listed, ast.List):
        raise ValueError("no list of calls")
    found = []
    for call in listed.elts:
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
            raise ValueError("no call with named arguments")
        given = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        json.dumps(given)  # raises for sets, bytes, ...
        found.append((ast.unparse(call.func), given))
    return found


def _write_python(calls: Sequence[tuple[str, Any]]) -> str:
    def keywords(given: Mapping[str, Any]) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in given.items())

    return f"[{', '.join(f'{name}({keywords(given)})' for name, given in calls)}]"


_HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n")
_FENCE = "```"
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

BLOCK_FORMATS = {
    one.name: one
    for one in (
        BlockFormat("qwen3_coder", "<tool_call>", "</tool_call>", _parse_xml, _write_xml, _HERMES),
        BlockFormat("qwen3_xml", "<tool_call>", "</tool_call>", _parse_xml, _write_xml, _HERMES),
        BlockFormat("glm45", "<tool_call>", "</tool_call>", _parse_pairs, _write_pairs, _HERMES),
        BlockFormat(
            "deepseek_v3",
            *_DEEPSEEK,
            required=_HERMES,
            **_entry_functions(
                r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<given>.*?)\n```<｜tool▁call▁end｜>",
                lambda n, name, given: (
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
                    f"{name}\n{_FENCE}json\n{given}\n{_FENCE}<｜tool▁call▁end｜>"
                ),
            ),
        ),
        BlockFormat(
            "deepseek_v31",
            *_DEEPSEEK,
            required=_HERMES,
            **_entry_functions(
                r"<｜tool▁call▁begin｜>(?P<name>.+?)<｜tool▁sep｜>(?P<given>.*?)<｜tool▁call▁end｜>",
                lambda n, name, given: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{given}<｜tool▁call▁end｜>",
            ),
        ),
        BlockFormat(
            "kimi_k2",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            required=_HERMES,
            **_entry_functions(
                r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s:<]+):\d+\s*"
                r"<\|tool_call_argument_begin\|>(?P<given>.*?)<\|tool_call_end\|>",
                lambda n, name, given: (
                    f"<|tool_call_begin|>functions.{name}:{n}"
                    f"<|tool_call_argument_begin|>{given}<|tool_call_end|>"
                ),
            ),
        ),
        BlockFormat("pythonic", "", "", _parse_python, _write_python, _HERMES),
        BlockFormat("llama4_pythonic", "", "", _parse_python, _write_python, _HERMES),
    )
}


CallFormat = ToolFormat | BlockFormat

FORMATS: dict[str, CallFormat] = {**tool_reading.FORMATS, **BLOCK_FORMATS}
"""Formats by vLLM's parser names."""

_TEMPLATE_TAGS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("<tool_calls>", "jamba"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|tool_call|>", "granite"),
    ("<|action_start|>", "internlm"),
    ("functools[", "phi4_mini_json"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
)
"""(text in a chat template, name of its format); the first match counts."""


def format_of(template: str | None) -> CallFormat:
    """Return the format of a chat template; SmolLM's if it has none."""
    source = template or ""
    if "<｜tool▁calls▁begin｜>" in source:
        return FORMATS["deepseek_v3" if "```json" in source else "deepseek_v31"]
    return FORMATS[next((name for tag, name in _TEMPLATE_TAGS if tag in source), "smollm")]
