"""Which of several things that an answer may be is at fault, where they have titles: tools, say."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from foreword.errors import RequestError
from foreword.structured.params import StructuredOutputs

_JSON = "%json "


def at_fault(wanted: StructuredOutputs, fails: Callable[[StructuredOutputs], bool]) -> str:
    """The title of the first alternative that fails by itself, with a colon; empty if none does."""
    for title, schema in _titled(wanted):
        try:
            is_bad = fails(StructuredOutputs(json=schema))
        except RequestError:
            is_bad = True
        if is_bad:
            return f"{title}: "
    return ""


def _titled(wanted: StructuredOutputs) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for schema in _schemas(wanted):
        inner = _part(schema, "items") or schema
        alternatives = _part(inner, "anyOf")
        for alternative in alternatives if isinstance(alternatives, list) else ():
            if isinstance(title := _part(alternative, "title"), str):
                yield title, alternative


def _schemas(wanted: StructuredOutputs) -> list[Any]:
    """Those inside a grammar or a structural tag, which may be a user's own and say anything."""
    if wanted.structural_tag is not None:
        return [
            _part(tag, "schema") for tag in _part(json.loads(str(wanted.structural_tag)), "structures") or ()
        ]
    grammar = wanted.grammar or ""
    begin = grammar.find(_JSON)
    try:
        return [] if begin < 0 else [json.JSONDecoder().raw_decode(grammar, begin + len(_JSON))[0]]
    except (ValueError, RecursionError):
        return []


def _part(value: object, key: str) -> Any:  # noqa: ANN401 - any JSON
    return value.get(key) if isinstance(value, dict) else None
