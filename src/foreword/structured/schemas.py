"""Where in a JSON schema other schemas stand."""

from collections.abc import Iterator
from typing import Any

DATA = frozenset({"const", "enum", "default", "examples", "x-guidance"})
"""Keywords whose values are no schemas."""

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by names of the user's own."""


def keywords(schema: object) -> Iterator[tuple[str, Any]]:
    """Yield every keyword of a schema and of those inside it, with its value."""
    remaining = [schema]
    while remaining:
        now = remaining.pop()
        if isinstance(now, list):
            remaining += now
        elif isinstance(now, dict):
            for keyword, value in now.items():
                yield keyword, value
                if keyword in NAMED and isinstance(value, dict):
                    remaining += value.values()
                elif keyword not in DATA:
                    remaining.append(value)
