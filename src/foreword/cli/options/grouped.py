"""Commands whose options are fields of frozen dataclasses."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import partial, wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

REQUIRED = MISSING  # default of a required option

_PARAMETER, _LAST = "parameter", "last"
"""Keys of a field's metadata: a function from the option's name to typer's parameter, and the rank in the help."""


def option(default: Any, text: str, *names: str, last: int = 0, **more: Any) -> Any:  # noqa: ANN401
    """Return a field for an option with this help; `names` and `more` are passed to `typer.Option`.

    The help lists options by rising `last`, so that those of a base class can follow those of the command.
    """
    make = partial(typer.Option, *names, help=text, **more)
    return field(default=default, metadata={_PARAMETER: lambda _: make(), _LAST: last})


def flag(text: str, last: int = 0) -> Any:  # noqa: ANN401
    """Return a field for a flag without a `--no-` form."""
    return field(
        default=False, metadata={_PARAMETER: lambda name: typer.Option(name, help=text), _LAST: last}
    )


def argument(default: Any, text: str, **more: Any) -> Any:  # noqa: ANN401
    """Return a field for a positional argument; `more` is passed to `typer.Argument`."""
    return field(default=default, metadata={_PARAMETER: lambda _: typer.Argument(help=text, **more)})


def late(default: Any, last: int) -> Any:  # noqa: ANN401
    """Return a field whose type annotation defines the option; `last` is its rank, as in `option`."""
    return field(default=default, metadata={_LAST: last})


class Command:
    """A command: its docstring is the help, its fields are the options."""

    def run(self) -> None:
        """Run the command with these options."""
        raise NotImplementedError


def command(kind: type[Command]) -> Callable[..., None]:
    """Return the function that typer calls for a command class."""

    def run(options: Command) -> None:
        options.run()

    run.__name__ = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower()
    run.__doc__ = kind.__doc__
    run.__annotations__ = {"options": kind, "return": None}
    return options_command(run)


Settings = TypeVar("Settings")


def pick(kind: type[Settings], options: object, **more: Any) -> Settings:  # noqa: ANN401
    """Create a dataclass from the options with its field names, and from `more`, which takes precedence."""
    settings: Any = kind
    shared = {one.name: getattr(options, one.name) for one in fields(settings) if hasattr(options, one.name)}
    return kind(**(shared | more))


def given(options: Any, *names: str) -> list[str]:  # noqa: ANN401 - a dataclass
    """Return the options of these fields that do not have their default values, such as --max-tokens."""
    return [
        f"--{one.name.replace('_', '-')}"
        for one in fields(options)
        if one.name in names and getattr(options, one.name) != one.default
    ]


def options_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function that typer calls for a function whose parameters are dataclasses of options.

    The fields become options; dataclasses may be nested. Other parameters are options as they are. A dataclass checks
    combinations of its options in `__post_init__`.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters = [
        option
        for name, parameter in inspect.signature(function).parameters.items()
        for option in _parameters(name, hints[name], parameter.default)
    ]
    defaults = {parameter.name: parameter.default for parameter in parameters}

    @wraps(function)
    def command(**given: Any) -> None:  # noqa: ANN401 - options of many types
        values = defaults | given
        function(**{name: _value(name, hint, values) for name, hint in hints.items() if name != "return"})

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameters(name: str, kind: Any, default: Any) -> Iterator[inspect.Parameter]:  # noqa: ANN401
    """Yield the parameter of this name and type, or those of all fields if the type is a dataclass."""
    if not is_dataclass(kind):
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        return
    for one, hint in _fields(kind):
        yield from _parameters(
            one.name, hint, inspect.Parameter.empty if one.default is MISSING else one.default
        )


def _value(name: str, kind: Any, values: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the value of a parameter; a dataclass is created from the values of its fields."""
    if not is_dataclass(kind):
        return values[name]
    group: Any = kind
    return group(**{one.name: _value(one.name, hint, values) for one, hint in _fields(kind)})


def _fields(kind: Any) -> list[tuple[Field[Any], Any]]:  # noqa: ANN401
    """Return the fields of a dataclass in the order of the help, each with its annotation for typer."""
    hints = get_type_hints(kind, include_extras=True)
    ordered = sorted(fields(kind), key=lambda one: one.metadata.get(_LAST, 0))
    return [(one, _annotated(one, hints[one.name])) for one in ordered]


def _annotated(one: Field[Any], hint: Any) -> Any:  # noqa: ANN401
    if _PARAMETER not in one.metadata:
        return hint
    return Annotated[hint, one.metadata[_PARAMETER](f"--{one.name.replace('_', '-')}")]
