"""How families of models write the calls of tools."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foreword.structured.params import StructuredOutputs

AUTO = "auto"


@dataclass(frozen=True)
class ToolFormat:
    """Calls are JSON objects with a name and arguments, between marks or without, each by itself or in a list."""

    name: str
    begin: str = ""  # before the calls; empty: an answer with calls is nothing but calls
    end: str = ""  # behind them
    inner: str = ""  # between a mark and what stands inside
    arguments: str = "arguments"  # what the arguments are called
    is_list: bool = False  # all calls in one list; else each between marks of its own
    hidden: str = ""  # a control token that may stand before the calls; it is not part of the text

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls (name, arguments) as the model itself would have written them."""
        entries = [json.dumps({"name": name, self.arguments: given}) for name, given in calls]
        if self.is_list:
            return f"{self.begin}{self.inner}[{', '.join(entries)}]{self.inner}{self.end}"
        return "\n".join(f"{self.begin}{self.inner}{entry}{self.inner}{self.end}" for entry in entries)

    def forced(self, tools: Sequence[tuple[str, Any]], most: int | None) -> StructuredOutputs:
        """An answer that is one call of these tools (name, schema of its arguments) or more, at most so many."""
        call = {"anyOf": [self._call_schema(name, schema) for name, schema in tools]}
        if self.is_list or not self.begin:
            listed: dict[str, Any] = {"type": "array", "items": call, "minItems": 1}
            if most is not None:
                listed["maxItems"] = most
            body = f"%json {json.dumps(_laid_out(listed if self.is_list else call))}"
        else:
            body = f"%json {json.dumps(_laid_out(call))}"
        marked = " ".join(
            part for part in (_text(self.begin + self.inner), body, _text(self.inner + self.end)) if part
        )
        if self.is_list or not self.begin or most == 1:
            return StructuredOutputs(grammar=f"start: {marked}")
        return StructuredOutputs(grammar=f'start: call ("\\n" call)*\ncall: {marked}')

    def allowed(self, tools: Sequence[tuple[str, Any]]) -> StructuredOutputs | None:
        """Any text in which calls, where there are some, are calls of these tools; None: that cannot be prescribed."""
        if not self.begin:
            return None
        call: dict[str, Any] = {"anyOf": [self._call_schema(name, schema) for name, schema in tools]}
        schema = {"type": "array", "items": call, "minItems": 1} if self.is_list else call
        tag = {"begin": self.begin + self.inner, "schema": _laid_out(schema), "end": self.inner + self.end}
        return StructuredOutputs(structural_tag={"structures": [tag], "triggers": [self.begin]})

    def _call_schema(self, name: str, schema: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON schema
        return {
            "title": f"tool {name}",  # told if its schema cannot be used
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments: schema},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


def _text(mark: str) -> str:
    return json.dumps(mark, ensure_ascii=False) if mark else ""


def _laid_out(schema: dict[str, Any]) -> dict[str, Any]:
    """With the one way to write JSON that the models were taught."""
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**schema, "x-guidance": options}


FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n"),
        ToolFormat("smollm", "<tool_call>", "</tool_call>", is_list=True),
        ToolFormat("llama3_json", arguments="parameters", hidden="<|python_tag|>"),
        ToolFormat("mistral", is_list=True, hidden="[TOOL_CALLS]"),
    )
}
"""By vLLM's names of parsers."""


def format_of(template: str | None) -> ToolFormat:
    """The format that a chat template teaches; SmolLM's, which needs no template, for one that teaches none."""
    source = template or ""
    if "[TOOL_CALLS]" in source:
        return FORMATS["mistral"]
    if "<tool_call>" in source:
        return FORMATS["hermes"]
    if "<|python_tag|>" in source or '"parameters": dictionary' in source:
        return FORMATS["llama3_json"]
    return FORMATS["smollm"]
