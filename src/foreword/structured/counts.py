"""Refuses structured outputs whose counts are out of bounds, before anything is compiled."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from foreword.errors import RequestError
from foreword.structured.lark import Kind, parts
from foreword.structured.limits import CountLimits
from foreword.structured.params import StructuredOutputs
from foreword.structured.regexes import expanded_size
from foreword.structured.schemas import keywords

_SHOWN = 10**12
"""Counts from here on are shown rounded."""

_BRANCHES = ("anyOf", "oneOf", "allOf")

_SYMBOLS = re.compile(
    r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}|~\s*(\d+)\s*(?:\.\.\s*(\d+))?|[()\[\]]|[^\s()\[\]{}~|*+?]+"
)


def check_counts(wanted: StructuredOutputs, limits: CountLimits | None = None) -> None:
    """Raise `RequestError` for counts, sizes and repetitions beyond the limits, with their names."""
    Counts(wanted.form, limits or CountLimits()).check(wanted)


class Counts:
    """Counts what the texts of one request contain."""

    def __init__(self, form: str, limits: CountLimits) -> None:
        self._form = form
        self._limits = limits
        self._totals: Counter[str] = Counter()

    def check(self, wanted: StructuredOutputs) -> None:
        """Check all texts of a request."""
        if wanted.json is not None:
            self._check_schema(json.loads(str(wanted.json)))
        if wanted.structural_tag is not None:
            tag = json.loads(str(wanted.structural_tag))
            structures = tag.get("structures") if isinstance(tag, dict) else None
            for structure in structures if isinstance(structures, list) else ():
                self._check_schema(structure.get("schema") if isinstance(structure, dict) else None)
        if wanted.grammar is not None:
            self._check_grammar(wanted.grammar)
        for name in ("regex", "whitespace_pattern"):
            if getattr(wanted, name) is not None:
                self._check_regex(name, getattr(wanted, name))

    def _check_regex(self, name: str, regex: str) -> None:
        self._check_size("" if name == self._form else f"{name}: ", expanded_size(regex))

    def _check_grammar(self, grammar: str) -> None:
        rules: list[str] = []
        for part in parts(grammar):
            if part.kind is Kind.SCHEMA:
                self._check_schema(part.value)
            elif part.kind is Kind.REGEX:
                self._check_regex("grammar", part.text)
            rules.append(part.text if part.kind is Kind.RULES else " x ")
        self._check_size("", _expanded_rules("".join(rules)))

    def _check_size(self, where: str, size: int) -> None:
        self._check("expanded", f"{where}symbols with all repetitions written out", size)

    def _check_schema(self, schema: object) -> None:
        for keyword, value in keywords(schema):
            self._check_keyword(keyword, value)

    def _check_keyword(self, keyword: str, value: Any) -> None:  # noqa: ANN401 - any JSON
        limits = self._limits
        number = max(value, 0) if isinstance(value, int | float) and not isinstance(value, bool) else 0
        if keyword in ("minItems", "maxItems"):
            self._bound(keyword, number, limits.items)
            self._check("items_in_all", "minItems and maxItems of all arrays", number)
        elif keyword in ("minLength", "maxLength"):
            self._bound(keyword, number, limits.length)
        elif keyword in ("minProperties", "maxProperties"):
            self._bound(keyword, number, limits.property_count)
        elif keyword == "multipleOf" and number:
            digits = Decimal(repr(number)).normalize().as_tuple().digits
            self._bound(
                "multipleOf without its decimal point", int("".join(map(str, digits))), limits.multiple
            )
        elif keyword in ("properties", "patternProperties") and isinstance(value, Mapping):
            self._check("properties", "properties", len(value))
            for pattern in value if keyword == "patternProperties" else ():
                self._check_regex(keyword, pattern)
        elif keyword == "enum" and isinstance(value, list):
            self._check("enum_values", "enum values", len(value))
        elif keyword in _BRANCHES and isinstance(value, list):
            self._check("branches", "cases of anyOf, oneOf and allOf", len(value))
        elif keyword == "pattern" and isinstance(value, str):
            self._check_regex(keyword, value)

    def _bound(self, keyword: str, number: float, most: int) -> None:
        if number > most:
            shown = (
                int(number) if number < _SHOWN else f"{Decimal(number).normalize():.3g}"
            )  # also beyond floats
            raise RequestError(
                f"structured outputs: {self._form}: {keyword} is {shown}, the limit is {most}; lower it"
            )

    def _check(self, limit: str, what: str, number: float) -> None:
        """Add to a total of the request."""
        self._totals[limit] += int(min(number, _SHOWN))
        most = getattr(self._limits, limit)
        if self._totals[limit] > most:
            found = self._totals[limit] if self._totals[limit] < _SHOWN else "too many"
            raise RequestError(
                f"structured outputs: {self._form}: {what}: {found}, the limit is {most}; make it smaller"
            )


def _expanded_rules(rules: str) -> int:
    """Return the number of symbols of a grammar's rules with counted repetitions written out."""
    sums, last = [0], 0
    for found in _SYMBOLS.finditer(rules):
        if found[0] in "([":
            sums.append(0)
            last = 0
        elif found[0] in ")]":
            last = sums.pop() if len(sums) > 1 else 0
            sums[-1] += last
        elif found[1] or found[3]:
            digits = (found[2] or found[1] or found[4] or found[3]).lstrip("0") or "1"
            more = last * ((int(digits) if len(digits) < 12 else _SHOWN) - 1)
            sums[-1], last = sums[-1] + more, last + more
        else:
            last = 1
            sums[-1] += 1
    return sum(sums)
