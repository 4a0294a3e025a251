"""Tool-call formats that are not JSON objects, detection of a format, and an incremental parser of blocks."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.server.api import tool_reading
from foreword.server.api.tool_reading import (
    ArgumentsDelta,
    CallStart,
    Event,
    TextDelta,
    ToolFormat,
    ToolReading,
    joined,
    overlap,
)
from foreword.structured.params import StructuredOutputs

Schemas = Mapping[str, Mapping[str, Any]]
Calls = list[tuple[str, Any]]


@dataclass(frozen=True)
class BlockFormat:
    """Calls are blocks of text between marks; without marks, an answer with calls consists only of calls."""

    name: str
    begin: str
    end: str
    parse: Callable[[str, Schemas], Calls]  # (name, arguments) of a block's calls; ValueError if invalid
    write: Callable[[Sequence[tuple[str, Any]]], str]  # inverse of `parse`, without the marks
    required: ToolFormat  # format for calls that a grammar enforces

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return calls (name, arguments) as the model would write them."""
        return f"{self.begin}{self.write(calls)}{self.end}"

    def forced(self, tools: Sequence[tuple[str, Any]], most: int | None) -> StructuredOutputs:
        """Return a grammar for at least one call of these tools, and at most `most`."""
        return self.required.forced(tools, most)

    def allowed(self, tools: Sequence[tuple[str, Any]]) -> StructuredOutputs | None:
        """Return None: optional calls of this format are not constrained."""
        return None

    def reader(self, tools: Schemas, only_calls: bool = False, most: int | None = None) -> ToolReading:
        if only_calls:
            return self.required.reader(tools, only_calls, most)
        return BlockReader(self, tools, most)


class BlockReader:
    """Incremental parser; a block, and text that may become a mark, is held back."""

    def __init__(self, form: BlockFormat, tools: Schemas, most: int | None = None) -> None:
        self._form = form
        self._tools = tools
        self._most = most
        self._held = ""
        self._inside = False
        self._has_said = False
        self.count = 0  # calls so far

    @property
    def is_cut(self) -> bool:
        return self._inside

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return joined(events)

    def finish(self) -> list[Event]:
        """End the answer: an incomplete block is text, unless its end has no mark."""
        events: list[Event] = []
        held, self._held = self._held, ""
        if self._inside and not self._form.end:
            self._block(held, held, events)
        else:
            self._say(held, events)
        return joined(events)

    def _step(self, events: list[Event]) -> bool:
        """Advance to the next mark; return False if the held text has none."""
        form, held = self._form, self._held
        if self._inside:
            block, found, after = held.partition(form.end) if form.end else (held, "", "")
            if found:
                self._held = after
                self._block(block.removeprefix(form.begin), block + found, events)
            return bool(found)
        if not form.begin:
            self._inside = not self._has_said and held.lstrip().startswith("[")
            if self._inside or not held.strip():
                return False
            before, found = held, ""
        else:
            before, found, _ = held.partition(form.begin)
            if not found:
                before = held[: len(held) - overlap(held, form.begin)]
        self._held = held[len(before) :]
        self._inside = bool(found)
        self._say(before, events)
        return bool(found)

    def _block(self, inside: str, written: str, events: list[Event]) -> None:
        self._inside = False
        try:
            calls = self._form.parse(inside.removeprefix(self._form.begin), self._tools)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            calls = []
        if not calls or any(name not in self._tools for name, _ in calls):
            self._say(written, events)
            return
        for name, given in calls:
            if self._most is None or self.count < self._most:
                arguments = json.dumps(given, ensure_ascii=False)
                events += [CallStart(self.count, name), ArgumentsDelta(self.count, arguments)]
                self.count += 1
        self._has_said = False

    def _say(self, text: str, events: list[Event]) -> None:
        """Report text; space around calls is reported only between texts."""
        if not self._has_said:
            text = text.lstrip() if self.count or self._inside else text
        self._has_said |= bool(text.strip())
        if text:
            events.append(TextDelta(text))


def _typed(text: str, schema: Mapping[str, Any], name: str) -> object:
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


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _object(text: str) -> object:
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
    return [(name, {key.strip(): _typed(text, schema, key.strip()) for key, text in given})]


def _write_xml(calls: Sequence[tuple[str, Any]]) -> str:
    blocks = []
    for name, given in calls:
        pairs = [(key, _shown(value)) for key, value in given.items()]
        written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
        blocks.append(f"\n<function={name}>\n{written}</function>\n")
    return "</tool_call>\n<tool_call>".join(blocks)


_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _parse_pairs(block: str, tools: Schemas) -> Calls:
    name = block.strip().partition("\n")[0].partition("<arg_key>")[0].strip()
    schema = tools.get(name, {})
    return [(name, {key.strip(): _typed(text, schema, key.strip()) for key, text in _PAIR.findall(block)})]


def _write_pairs(calls: Sequence[tuple[str, Any]]) -> str:
    def pairs(given: Mapping[str, Any]) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_shown(value)}</arg_value>\n"
            for key, value in given.items()
        )

    return "</tool_call>\n<tool_call>".join(f"{name}\n{pairs(given)}" for name, given in calls)


def _listed(pattern: str, written: Callable[[int, str, str], str]) -> dict[str, Any]:
    """Create a format with one entry per call: name and JSON arguments; `written` gets (index, name, JSON)."""
    entry = re.compile(pattern, re.DOTALL)

    def parse(block: str, tools: Schemas) -> Calls:
        return [(found["name"].strip(), _object(found["given"])) for found in entry.finditer(block)]

    def write(calls: Sequence[tuple[str, Any]]) -> str:
        return "".join(written(n, name, json.dumps(given)) for n, (name, given) in enumerate(calls))

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
            **_listed(
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
            **_listed(
                r"<｜tool▁call▁begin｜>(?P<name>.+?)<｜tool▁sep｜>(?P<given>.*?)<｜tool▁call▁end｜>",
                lambda n, name, given: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{given}<｜tool▁call▁end｜>",
            ),
        ),
        BlockFormat(
            "kimi_k2",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            required=_HERMES,
            **_listed(
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

_TAUGHT = (
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
"""(text in a template, its format); the first match counts."""


def format_of(template: str | None) -> CallFormat:
    """Return the format of a chat template; SmolLM's if it has none."""
    source = template or ""
    if "<｜tool▁calls▁begin｜>" in source:
        return FORMATS["deepseek_v3" if "```json" in source else "deepseek_v31"]
    return FORMATS[next((name for mark, name in _TAUGHT if mark in source), "smollm")]
