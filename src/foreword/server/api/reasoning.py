"""Reasoning tags of model families, and an incremental parser that separates reasoning from text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.errors import RequestError
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.server.api.call_format import AUTO, overlap
from foreword.structured.params import StructuredOutputs, Thinking

_CONTROL = re.compile(r"<\|\w+\|>")
"""A control token by its name, such as <|end|>."""

_TAIL = 32
"""Number of tokens at the end of a prompt that show whether the prompt opened or closed the reasoning."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags around reasoning at the start of an answer."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    is_open: bool = False  # whether answers always start with reasoning, even if the prompt does not open it
    instead: str = ""  # the tag at the start of an answer without reasoning
    next_headers: tuple[
        str, ...
    ] = ()  # other texts that end the reasoning, and are part of the text after it

    def without_control_tokens(self) -> "ReasoningFormat":
        """Return the tags as they are in decoded text, which omits control tokens."""
        begin, end, instead = (_CONTROL.sub("", tag) for tag in (self.begin, self.end, self.instead))
        headers = tuple(_CONTROL.sub("", header) for header in self.next_headers)
        return replace(self, begin=begin, end=end, instead=instead, next_headers=headers)


_FORMATS = (
    ReasoningFormat("deepseek_r1", is_open=True),
    ReasoningFormat("deepseek_v3"),
    ReasoningFormat("ernie45", is_open=True),
    ReasoningFormat("glm45"),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    ReasoningFormat("kimi_k2"),
    ReasoningFormat("minimax_m2", is_open=True),
    ReasoningFormat("olmo3", is_open=True),
    ReasoningFormat(  # Harmony: channels of gpt-oss
        "openai_gptoss",
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        instead="<|channel|>final<|message|>",
        next_headers=(  # of calls, and of messages before them
            "<|end|><|start|>assistant<|channel|>commentary",
            "<|end|><|start|>assistant to=functions.",
        ),
    ),
    ReasoningFormat("qwen3"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", is_open=True),
    ReasoningFormat("step3", is_open=True),
)
FORMATS = {tags.name: tags for tags in _FORMATS}
"""Tags by vLLM's parser names."""


def reasoning_format(parser: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return a parser's format; for `auto`, that of the tags in the chat template. None: reasoning is not separated."""
    if parser != AUTO:
        return FORMATS.get(parser)
    template = tokenizer.chat_template or ""
    if "<|channel|>" in template:
        return FORMATS["openai_gptoss"]
    return next((FORMATS[name] for name in ("seed_oss", "qwen3") if FORMATS[name].end in template), None)


@dataclass(frozen=True)
class Reasoning:
    """Reasoning format of one request's answers."""

    tags: ReasoningFormat
    is_open: bool  # the answer starts inside the reasoning

    @staticmethod
    def after(ids: Sequence[int], tags: ReasoningFormat | None, tokenizer: Tokenizer) -> "Reasoning | None":
        """Return the reasoning of answers to a prompt; None if `tags` is None or the prompt closed the reasoning."""
        if tags is None:
            return None
        tail = tokenizer.decode(ids[-_TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(tags.end):
            return None
        return Reasoning(tags, tags.is_open or tail.endswith(tags.begin))

    def limit(
        self, budget: int | None, structured: StructuredOutputs | None, end: str = ""
    ) -> Thinking | None:
        """Return the engine's parameters for a token budget or a grammar after the reasoning; None without both.

        `end`: the tag that ends the reasoning; empty: the format's.
        """
        if budget is None and structured is None:
            return None
        return Thinking(end or self.tags.end, self.tags.begin, budget, self.is_open)


def check_budget(budget: int | None, tags: ReasoningFormat | None) -> None:
    """Raise `RequestError` for a token budget of reasoning without a reasoning format."""
    if budget is not None and tags is None:
        raise RequestError(
            "thinking_token_budget: this server was started without --reasoning-parser, which names the model's "
            "tags; leave it out",
            "thinking_token_budget",
        )


class ReasoningReader:
    """Incremental parser that separates reasoning from text: a state machine.

    It holds back text that may become a tag, and space before this text.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._format = reasoning.tags.without_control_tokens()
        self._is_open = reasoning.is_open
        self._held = ""  # text that was not returned yet
        self._has_reasoning = False  # whether reasoning was returned
        self._read = self._start  # the state: reads the held-back text

    def feed(self, text: str, is_end: bool) -> tuple[str, str]:
        """Read new text of the answer; return the new reasoning and the new text after it."""
        self._held += text
        return self._read(is_end)

    def _start(self, is_end: bool) -> tuple[str, str]:
        written = self._held.lstrip()
        if written.startswith(self._format.begin):
            self._held = written.removeprefix(self._format.begin)
            self._read = self._thinking
        elif not is_end and any(
            tag.startswith(written) for tag in (self._format.begin, self._format.instead)
        ):
            return "", ""  # the text may become a tag
        else:
            self._held = self._held.removeprefix(self._format.instead)
            self._read = self._thinking if self._is_open else self._text
        return self._read(is_end)

    def _thinking(self, is_end: bool) -> tuple[str, str]:
        """Return new reasoning, without the space next to its tags."""
        if not self._has_reasoning:
            self._held = self._held.lstrip()
        held, tags = self._held, (self._format.end, *self._format.next_headers)
        positions = [(held.find(tag), tag) for tag in tags if tag in held]
        if positions:
            position, tag = min(positions)
            # The end tag is dropped; another header belongs to the text after the reasoning.
            after = position + len(tag) if tag == self._format.end else position
            self._held = held[after:]
            self._read = self._after
            return held[:position].rstrip(), self._read(is_end)[1]
        partial_tag = 0 if is_end else max(overlap(held, tag) for tag in tags)
        text = held[: len(held) - partial_tag].rstrip()
        self._held = "" if is_end else held[len(text) :]
        self._has_reasoning |= bool(text)
        return text, ""

    def _after(self, is_end: bool) -> tuple[str, str]:
        """Drop the space after the reasoning."""
        self._held = self._held.lstrip()
        if self._held:
            self._read = self._text
        return "", self._text(is_end)[1]

    def _text(self, is_end: bool) -> tuple[str, str]:
        text, self._held = self._held, ""
        return "", text
