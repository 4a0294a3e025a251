"""Chat templates: jinja2 text that came with a model, rendered in a sandbox."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2

from foreword.errors import TokenizerError
from foreword.models.tokenization.template_sandbox import BoundedEnvironment, TemplateTooLarge, render_bounded

MOST_INDENT = 64
"""Spaces by which a template may indent JSON."""


class ChatTemplate:
    """A chat template, compiled at first use, so that a model with an invalid one still accepts raw text.

    The text is not trusted: it cannot reach or change Python objects, and its work and output are bounded.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)  # bos_token, eos_token, ... as the template names them

    @property
    def takes_tools(self) -> bool:
        """Return whether the template supports tools."""
        return re.search(r"\btools\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as one text; `variables` are additional values for the template."""
        template = self._template
        try:
            return render_bounded(
                template,
                {
                    **(variables or {}),
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None if tools is None else [dict(tool) for tool in tools],
                    "documents": None,
                    **self._special_tokens,
                },
            )
        except Exception as error:  # a template is a program and may raise anything
            raise TokenizerError(
                f"the model's chat template refused the messages: {_one_line(error)}; change them"
            ) from None

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TokenizerError(
                f"the model's chat template is broken ({_one_line(error)}); send raw text (--raw, raw=True)"
            ) from None


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as in transformers; jinja2's own filter escapes HTML, unlike training data."""
    if isinstance(indent, int) and indent > MOST_INDENT:
        raise TemplateTooLarge(f"it indents JSON by more than {MOST_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
