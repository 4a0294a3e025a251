"""Commands whose options are the fields of frozen dataclasses."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def options_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command for a function of dataclasses: their fields become options, those of nested groups too.

    Other parameters of the function become options as they are. Fields have typer's annotations. A group checks what
    its options mean together in `__post_init__`.
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
    for field, field_kind in _fields(kind):
        absent = inspect.Parameter.empty if field.default is MISSING else field.default
        yield from _options(field.name, field_kind, absent)


def _value(name: str, kind: Any, given: dict[str, Any]) -> Any:  # noqa: ANN401
    if not is_dataclass(kind):
        return given[name]
    group: Any = kind
    return group(**{field.name: _value(field.name, field_kind, given) for field, field_kind in _fields(kind)})


def _fields(kind: Any) -> list[tuple[Field[Any], Any]]:  # noqa: ANN401
    hints = get_type_hints(kind, include_extras=True)
    return [(field, hints[field.name]) for field in fields(kind)]
