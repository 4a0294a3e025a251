"""Commands whose options are fields of frozen dataclasses."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import partial, wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

REQUIRED = MISSING
"""Default of a required option."""

_OPTION, _LAST = "option", "last"


def option(default: Any, text: str, *names: str, last: int = 0, **more: Any) -> Any:  # noqa: ANN401
    """Return a field for an option with this help; `names` and `more` are passed to `typer.Option`.

    Options are listed by rising `last`, so that those of a base class can follow the others.
    """
    made = partial(typer.Option, *names, help=text, **more)
    return field(default=default, metadata={_OPTION: lambda _: made(), _LAST: last})


def flag(text: str, last: int = 0) -> Any:  # noqa: ANN401
    """Return a field for a flag without a `--no-` form."""
    return field(default=False, metadata={_OPTION: lambda name: typer.Option(name, help=text), _LAST: last})


def argument(default: Any, text: str, **more: Any) -> Any:  # noqa: ANN401
    return field(default=default, metadata={_OPTION: lambda _: typer.Argument(help=text, **more)})


def late(default: Any, last: int) -> Any:  # noqa: ANN401
    """Return a field with an annotated option, listed by `last`; see `option`."""
    return field(default=default, metadata={_LAST: last})


class Command:
    """A command: its docstring is the help, its fields are the options."""

    def run(self) -> None:
        raise NotImplementedError


def command(kind: type[Command]) -> Callable[..., None]:
    def run(given: Command) -> None:
        given.run()

    run.__name__ = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower()
    run.__doc__ = kind.__doc__
    run.__annotations__ = {"given": kind, "return": None}
    return options_command(run)


Settings = TypeVar("Settings")


def pick(kind: type[Settings], given: object, **more: Any) -> Settings:  # noqa: ANN401
    """Create a dataclass from the options with its field names, and from `more`, which takes precedence."""
    wanted: Any = kind
    own = {one.name: getattr(given, one.name) for one in fields(wanted) if hasattr(given, one.name)}
    return kind(**(own | more))


def options_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command for a function of dataclasses, whose fields become options, also of nested groups.

    Other parameters become options unchanged. Fields have typer's annotations. A group checks combinations in
    `__post_init__`.
    """
    hints = get_type_hints(function, include_extras=True)
    names = inspect.signature(function).parameters
    parameters = [
        option for name, own in names.items() for option in _options(name, hints[name], own.default)
    ]

    defaults = {option.name: option.default for option in parameters}

    @wraps(function)
    def command(**given: Any) -> None:  # noqa: ANN401 - options of many types
        values = defaults | given
        function(**{name: _value(name, hints[name], values) for name in names})

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in parameters}
    return command


def _options(name: str, kind: Any, default: Any) -> Iterator[inspect.Parameter]:  # noqa: ANN401
    if not is_dataclass(kind):
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        return
    for one, hint in _fields(kind):
        absent = inspect.Parameter.empty if one.default is MISSING else one.default
        yield from _options(one.name, hint, absent)


def _value(name: str, kind: Any, given: dict[str, Any]) -> Any:  # noqa: ANN401
    if not is_dataclass(kind):
        return given[name]
    group: Any = kind
    return group(**{one.name: _value(one.name, hint, given) for one, hint in _fields(kind)})


def _fields(kind: Any) -> list[tuple[Field[Any], Any]]:  # noqa: ANN401
    hints = get_type_hints(kind, include_extras=True)
    ordered = sorted(fields(kind), key=lambda one: one.metadata.get(_LAST, 0))
    return [(one, _annotated(one, hints[one.name])) for one in ordered]


def _annotated(one: Field[Any], hint: Any) -> Any:  # noqa: ANN401
    if _OPTION not in one.metadata:
        return hint
    return Annotated[hint, one.metadata[_OPTION](f"--{one.name.replace('_', '-')}")]
