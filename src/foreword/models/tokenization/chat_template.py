"""Chat templates: untrusted jinja2 code that came with a model, rendered in a sandbox.

The work and the output of a rendering are limited. Work is counted in executed lines of Python, so that the limit does
not depend on the machine. The length of a text is checked before the text is built.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, wraps
from types import FrameType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_format, do_replace, sync_do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from foreword.errors import TokenizerError

MOST_INDENT = 64  # maximum number of spaces by which a template may indent JSON


class ChatTemplate:
    """A chat template. It is compiled at first use, so that a model with an invalid template still accepts raw text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)  # keys: bos_token, eos_token, ...

    @property
    def takes_tools(self) -> bool:
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
            return BoundedEnvironment().from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TokenizerError(
                f"the model's chat template is broken ({_one_line(error)}); send raw text (--raw, raw=True)"
            ) from None


def _to_json(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, as transformers does; training data has no escaped HTML, which jinja2's filter makes."""
    if isinstance(indent, int) and indent > MOST_INDENT:
        raise TemplateTooLarge(f"it indents JSON by more than {MOST_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


MAX_LINES = 2_000_000
"""Maximum number of executed lines per rendering, about a second. A conversation of 1,000 messages takes 20,000."""

MAX_CHARACTERS = 1 << 26  # maximum length of any text that a template builds
_GROWING_METHODS = ("center", "expandtabs", "ljust", "replace", "rjust", "zfill")  # methods of texts
_SIZED = (str, list, tuple)
_NUMBER = re.compile(r"\d+")
# The groups are width and precision.
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?[a-zA-Z]")


class TemplateTooLarge(jinja2.TemplateError):
    """A rendering exceeded its limits."""


def render_bounded(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    """Return the rendered text, or raise `TemplateTooLarge`."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += 1
        if lines > MAX_LINES:
            raise TemplateTooLarge(f"it runs more than {MAX_LINES} lines")
        return trace

    outer_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        return template.render(values)
    finally:
        sys.settrace(outer_trace)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with limits on text lengths. Templates cannot reach Python's internals or change objects."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControlExtension]
        )
        self.code_generator_class = _BoundedGenerator
        self.concat = bounded_concat  # type: ignore[method-assign]
        for name in ("batch", "center", "indent"):
            self.filters[name] = _bounded(self.filters[name])
        self.filters |= {"format": _format, "join": _join, "replace": _replace, "tojson": _to_json}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """Evaluate an operator; refuse it if the result may be too large."""
        if operator == "+":
            _check(_size(left) + _size(right) if isinstance(left, _SIZED) else 0)
        elif operator == "%":
            _check_percent(left, right)
        elif operator == "**" or isinstance(left, _SIZED) or isinstance(right, _SIZED):
            _check((len(str(left)) if operator == "**" else _size(left)) * _size(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call a function or method for a template; refuse it if the result may be too large."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "join":
            return _joined(owner, *args)
        if isinstance(owner, str) and name == "translate":
            _check(len(owner) * max([1, *_lengths(args)]))
        if isinstance(owner, str) and name in _GROWING_METHODS:
            _check_growth(owner, (*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401
        """Return a checked version of a text's `format` or `format_map` method; None for other values.

        jinja2 replaces these methods by a function of its own, so that `call` cannot recognise them.
        """
        plain = super().wrap_str_format(value)
        return None if plain is None else _bounded_format(plain, self, value)


class _BoundedGenerator(CodeGenerator):
    """Compiles `a ~ b` to a call of the environment's bounded `concat`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2 names it so
        """Compile `a ~ b`, which the sandbox does not intercept as it does other operators."""
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _GenerationBlock(Extension):
    """The block `{% generation %}` marks the assistant's text for training. It is rendered as its content alone."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def bounded_concat(parts: Iterable[str]) -> str:
    """Join parts into one text of limited length. All output of a template passes through this function."""
    checked: list[str] = []
    length = 0
    for part in parts:
        length += len(part)
        _check(length)
        checked.append(part)
    return "".join(checked)


def _size(value: object) -> int:
    """Return the length of a value; for an integer, its magnitude, since it may be a width or a number of copies."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, _SIZED) else 1


def _check_growth(value: object, arguments: Iterable[object]) -> None:
    """Raise `TemplateTooLarge` if a method or filter may return too long a text for these arguments.

    The bound holds for all methods and filters that are checked: (length + 1) x the largest argument.
    """
    _check((_size(value) + 1) * max([1, *map(_size, arguments)]))


def _check_percent(value: object, right: object) -> None:
    """Raise `TemplateTooLarge` if `value % right` may be too long: all widths, and the longest argument per field."""
    if not isinstance(value, str):
        return
    fields = right.values() if isinstance(right, Mapping) else right if isinstance(right, tuple) else (right,)
    star_width = max([abs(field) for field in fields if isinstance(field, int)], default=0)
    widths = [
        star_width if number == "*" else int(number)
        for numbers in _PERCENT_FIELD.findall(value)
        for number in numbers
        if number
    ]
    _check(len(value) + sum(widths) + max([1, *_lengths(fields)]) * value.count("%"))


def _lengths(values: Iterable[object]) -> Iterable[int]:
    """Yield the lengths of texts, lists and tuples among the values, and of those within mappings among the values."""
    for value in values:
        if isinstance(value, Mapping):
            yield from _lengths(value.values())
        elif isinstance(value, _SIZED):
            yield len(value)


class _FieldSizes(SandboxedFormatter):
    """Measures the result of `str.format` without building it. A field's width may itself be an argument."""

    total = 0  # characters so far

    def format_field(self, value: Any, format_spec: str) -> str:  # noqa: ANN401
        # `int` refuses thousands of digits; 20 digits are already too large a width.
        widths = [int(number.lstrip("0")[:20] or 0) for number in _NUMBER.findall(format_spec)]
        self.total += sum(widths) + (len(value) if isinstance(value, _SIZED) else 1)
        _check(self.total)
        # In `{:{width}}`, the inner value becomes part of the outer format specification. Elsewhere the returned text
        # is not used.
        return str(value) if isinstance(value, int | str) else ""


def _check(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise TemplateTooLarge(f"it builds a text of more than {MAX_CHARACTERS} characters")


def _bounded(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that first checks how long its result may be."""

    @wraps(plain)
    def checked(value: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        _check_growth(value, (*args, *kwargs.values()))
        return plain(value, *args, **kwargs)

    return checked


def _bounded_format(
    plain: Callable[..., str],
    environment: ImmutableSandboxedEnvironment,
    method: Any,  # noqa: ANN401
) -> Callable[..., str]:
    @wraps(plain)
    def checked(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401
        given, named = ((), args[0]) if method.__name__ == "format_map" and args else (args, kwargs)
        _FieldSizes(environment).vformat(method.__self__, given, named)
        return plain(*args, **kwargs)

    return checked


def _format(value: object, *args: Any, **kwargs: Any) -> str:  # noqa: ANN401
    _check_percent(str(value), kwargs or args)
    return do_format(str(value), *args, **kwargs)


@pass_eval_context
def _replace(context: EvalContext, text: object, old: str, new: str, count: int | None = None) -> str:
    _check_growth(text, (new,))
    return do_replace(context, str(text), old, new, count)


@pass_eval_context
def _join(
    context: EvalContext, values: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        return str(sync_do_join(context, values, d, attribute))
    return _joined(str(d), values)


def _joined(separator: str, values: Iterable[Any]) -> str:
    return bounded_concat(part for value in values for part in (separator, str(value)))[len(separator) :]
