"""What a server said, whole or in a stream, on either of OpenAI's routes, in one form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HALF = "\ufffd"
"""A token that is part of a character is told as this. Several tokens then have one text: in a list by texts only one
of them is left, and lengths say nothing."""


@dataclass(frozen=True)
class Token:
    """One token of an answer, with what the server says of it."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]  # the likeliest in its place, with their logprobs, likeliest first


@dataclass
class Choice:
    """One answer."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)  # where log probabilities were asked for
    offsets: list[int] = field(default_factory=list)  # completions only
    token_ids: list[int] | None = None

    def take(self, told: Mapping[str, Any]) -> None:
        """A choice of a whole answer, or of a chunk."""
        self.text += _text(told)
        self.finish_reason = told.get("finish_reason") or self.finish_reason
        if isinstance(ids := told.get("token_ids"), list):
            self.token_ids = [*(self.token_ids or []), *ids]
        if isinstance(logprobs := told.get("logprobs"), Mapping):
            self._take_logprobs(logprobs)

    def _take_logprobs(self, told: Mapping[str, Any]) -> None:
        if isinstance(content := told.get("content"), list):
            for entry in content:
                top = ((other["token"], other["logprob"]) for other in entry.get("top_logprobs") or ())
                self.tokens.append(Token(entry["token"], entry["logprob"], _ranked(top)))
            return
        tops = told.get("top_logprobs") or [None] * len(told["tokens"])
        for text, logprob, top in zip(told["tokens"], told["token_logprobs"], tops, strict=True):
            # Of a prompt's first token nothing is known.
            self.tokens.append(Token(text, 0.0 if logprob is None else logprob, _ranked((top or {}).items())))
        self.offsets += told.get("text_offset") or []


@dataclass(frozen=True)
class Usage:
    """Tokens as the server counts them."""

    prompt: int
    completion: int
    total: int


@dataclass
class Answer:
    """All answers to one request."""

    body: Mapping[str, Any]  # what was asked
    choices: dict[int, Choice] = field(default_factory=dict)  # by the index that the server gave
    usage: Usage | None = None
    prompt_ids: list[int] | None = None

    def take(self, told: Mapping[str, Any]) -> None:
        """A whole answer, or a chunk of it; KeyError, TypeError or ValueError if it is none."""
        for choice in told["choices"]:
            self.choices.setdefault(int(choice.get("index", 0)), Choice()).take(choice)
            if isinstance(ids := choice.get("prompt_token_ids"), list):
                self.prompt_ids = ids
        if isinstance(ids := told.get("prompt_token_ids"), list):
            self.prompt_ids = ids
        if isinstance(usage := told.get("usage"), Mapping):
            counts = (usage[f"{name}_tokens"] for name in ("prompt", "completion", "total"))
            self.usage = Usage(*counts)

    @property
    def first(self) -> Choice:
        """The only answer of a request for one."""
        return self.choices.get(0) or Choice()

    @property
    def is_cut(self) -> bool:
        """Whether the answer breaks off: every whole choice has a finish_reason."""
        return not self.choices or any(choice.finish_reason is None for choice in self.choices.values())

    @property
    def lengths(self) -> list[int]:
        """Tokens of every choice, as listed, else the mean by `usage`; empty where the server gives neither."""
        listed = [len(choice.token_ids or choice.tokens) for choice in self.choices.values()]
        if all(listed) or self.usage is None:
            return [length for length in listed if length]
        return [self.usage.completion // len(listed)] * len(listed)

    @property
    def text(self) -> str:
        return self.first.text

    @property
    def said(self) -> list[tuple[int, str, str | None]]:
        """What a user reads: index, text and reason of every choice."""
        return [(i, self.choices[i].text, self.choices[i].finish_reason) for i in sorted(self.choices)]


def _text(told: Mapping[str, Any]) -> str:
    part = told.get("delta") or told.get("message")
    text = part.get("content") if isinstance(part, Mapping) else told.get("text")
    return text or ""


def _ranked(pairs: Any) -> tuple[tuple[str, float], ...]:  # noqa: ANN401 - pairs of whatever the server sent
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))
