"""All tool-call formats, and detection by chat template."""

from foreword.server.api import tool_blocks, tool_reading
from foreword.server.api.tool_blocks import BlockFormat
from foreword.server.api.tool_reading import ToolFormat

CallFormat = ToolFormat | BlockFormat

FORMATS: dict[str, CallFormat] = {**tool_reading.FORMATS, **tool_blocks.BLOCK_FORMATS}
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
