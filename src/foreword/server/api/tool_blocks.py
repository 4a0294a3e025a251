"""Tool-call formats that are not JSON objects, with their incremental parser, and the choice of a model's format."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.server.api import tool_reading
from foreword.server.api.call_format import (
    ArgumentsDelta,
    CallFormat,
    CallReader,
    CallStart,
    Event,
    Schemas,
    TextDelta,
    by_name,
    merge_events,
    overlap,
)
from foreword.server.api.named_calls import NAMED_FORMATS
from foreword.server.api.tool_syntax import (
    Calls,
    entry_functions,
    parse_pairs,
    parse_python,
    parse_python_lines,
    python_calls,
    tag_functions,
    write_pairs,
    write_python,
)
from foreword.structured.params import StructuredOutputs

_HERMES = tool_reading.FORMATS["hermes"]
"""JSON format of calls that a grammar enforces, for all formats of this file."""


@dataclass(frozen=True)
class BlockFormat(CallFormat):
    """A format of tool calls: blocks of text between tags. Without tags, an answer with calls has no other text."""

    begin: str  # tag before a block; empty: none
    end: str  # tag after a block; empty: none
    parse: Callable[[str, Schemas], Calls]  # (name, arguments) of a block's calls; ValueError if invalid
    write: Callable[[Sequence[tuple[str, Any]]], str]  # inverse of `parse`, without the tags

    def format_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return f"{self.begin}{self.write(calls)}{self.end}"

    def required_grammar(self, tools: Sequence[tuple[str, Any]], max_calls: int | None) -> StructuredOutputs:
        return _HERMES.required_grammar(tools, max_calls)

    def reader(self, tools: Schemas, only_calls: bool = False, max_calls: int | None = None) -> CallReader:
        if only_calls:
            return _HERMES.reader(tools, only_calls, max_calls)
        return BlockReader(self, tools, max_calls)


class BlockReader:
    """Incremental parser of a `BlockFormat`; it holds back blocks, and text that may become a tag."""

    def __init__(self, call_format: BlockFormat, tools: Schemas, max_calls: int | None = None) -> None:
        self._format = call_format
        self._tools = tools
        self._max_calls = max_calls
        self._held = ""  # text without events so far
        self._is_inside = False  # whether `_held` begins with a block
        self._has_text = False  # whether text other than space was reported after the last call
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
            if not call_format.end or call_format.end not in held:
                return False
            block, end, self._held = held.partition(call_format.end)
            # Some models write the opening tag twice; `_end_block` removes the second one.
            self._end_block(block.removeprefix(call_format.begin), block + end, events)
            return True
        if not call_format.begin:
            self._is_inside = not self._has_text and held.lstrip().startswith("[")
            if self._is_inside or not held.strip():
                return False
            before, tag = held, ""
        else:
            before, tag, _ = held.partition(call_format.begin)
            if not tag:
                before = held[: len(held) - overlap(held, call_format.begin)]
        self._held = held[len(before) :]
        self._is_inside = bool(tag)
        self._add_text(before, events)
        return bool(tag)

    def _end_block(self, block: str, written: str, events: list[Event]) -> None:
        """Add the events of the calls in a block; if it has none, `written`, the block with its tags, is text."""
        self._is_inside = False
        try:
            calls = self._format.parse(block.removeprefix(self._format.begin), self._tools)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
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
        if not self._has_text and (self.count or self._is_inside):
            text = text.lstrip()
        self._has_text |= bool(text.strip())
        if text:
            events.append(TextDelta(text))


_QWEN_FUNCTIONS = tag_functions("function={}", "parameter={}", "\n", "</tool_call>\n<tool_call>")
_SEED_FUNCTIONS = tag_functions("function={}", "parameter={}", "", "</seed:tool_call>\n<seed:tool_call>")
_FENCE = "```"
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

BLOCK_FORMATS = by_name(
    *(
        BlockFormat(name, "<tool_call>", "</tool_call>", **_QWEN_FUNCTIONS)
        for name in ("qwen3_coder", "qwen3_xml", "mimo", "step3p5")
    ),
    BlockFormat("seed_oss", "<seed:tool_call>", "</seed:tool_call>", **_SEED_FUNCTIONS),
    BlockFormat(
        "minimax_m2",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        **tag_functions('invoke name="{}"', 'parameter name="{}"', ""),
    ),
    *(
        BlockFormat(name, "<tool_call>", "</tool_call>", parse_pairs, write_pairs)
        for name in ("glm45", "glm47")
    ),
    BlockFormat(
        "olmo3",
        "<function_calls>",
        "</function_calls>",
        parse_python_lines,
        lambda calls: "\n".join(python_calls(calls)),
    ),
    BlockFormat(
        "deepseek_v3",
        *_DEEPSEEK,
        **entry_functions(
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
        **entry_functions(
            r"<｜tool▁call▁begin｜>(?P<name>.+?)<｜tool▁sep｜>(?P<given>.*?)<｜tool▁call▁end｜>",
            lambda n, name, given: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{given}<｜tool▁call▁end｜>",
        ),
    ),
    BlockFormat(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        **entry_functions(
            r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s:<]+):\d+\s*"
            r"<\|tool_call_argument_begin\|>(?P<given>.*?)<\|tool_call_end\|>",
            lambda n, name, given: (
                f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{given}<|tool_call_end|>"
            ),
        ),
    ),
    BlockFormat("pythonic", "", "", parse_python, write_python),
    BlockFormat("llama4_pythonic", "", "", parse_python, write_python),
)


FORMATS: dict[str, CallFormat] = {**tool_reading.FORMATS, **BLOCK_FORMATS, **NAMED_FORMATS}
"""Formats by vLLM's parser names."""

_TEMPLATE_TAGS = (
    ("[ARGS]", "mistral_args"),
    ("<|channel|>", "openai"),
    ("[TOOL_CALLS]", "mistral"),
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<longcat_tool_call>", "longcat"),
    ("<function_calls>", "olmo3"),
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
