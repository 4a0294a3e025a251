"""JSON schemas of many kinds, each with values that fit it and values that do not."""

from dataclasses import dataclass
from typing import Any

from helpers import schema_documents as made
from helpers import schema_kinds as kinds


@dataclass(frozen=True)
class SchemaCase:
    name: str
    schema: dict[str, Any]
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


MAKERS = (
    *(kinds.types, kinds.enums, kinds.integers, kinds.numbers, kinds.strings, kinds.patterns, kinds.formats),
    *(kinds.arrays, kinds.objects, made.combinations, made.references, made.odd_texts, made.documents),
)


def corpus() -> list[SchemaCase]:
    """All of them; names are different."""
    return [SchemaCase(*case) for maker in MAKERS for case in maker()]
