"""Limits of structured outputs, and checks of counts in schemas, expressions and grammars."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from foreword.structured.dialects import Kind, copies, count_expanded, keywords, parts, regex_size
from foreword.structured.params import StructuredOutputs, refusal

if TYPE_CHECKING:
    from llguidance import LLParserLimits


@dataclass(frozen=True)
class CountLimits:
    """Limits on the numbers in a schema, regular expression or grammar, checked before compilation."""

    items: int = 10_000  # value of minItems and maxItems; llguidance creates a symbol per item
    items_in_all: int = 20_000  # sum of minItems and maxItems over all arrays of a schema
    length: int = 1_000_000  # value of minLength and maxLength
    property_count: int = 10_000  # value of minProperties and maxProperties
    properties: int = 2_000  # total keys of a schema; compile time grows quadratically
    enum_values: int = 10_000  # total enum values of a schema
    branches: int = 2_000  # total alternatives in anyOf, oneOf and allOf
    multiple: int = 10_000  # multipleOf without its decimal point; llguidance has a state per remainder
    expanded: int = 300_000  # symbols of an expression or of a grammar's rules after expanding repetitions


@dataclass(frozen=True)
class CompileLimits:
    """Limits on compiling a grammar in a separate process, enforced by the operating system."""

    cpu_seconds: float = 2.0
    patience: int = 12  # wall-clock limit as a multiple of cpu_seconds, for busy machines
    memory_bytes: int = 96 << 20  # on top of the process's initial memory
    at_once: int = 4  # concurrent compilations
    at_once_per_tenant: int = 2  # concurrent compilations of one tenant


@dataclass(frozen=True)
class MaskLimits:
    """Limits on computing masks, in CPU seconds."""

    one_mask: float = 0.1  # a slower mask ends its request
    slow_mask: float = 0.005  # slower masks are computed between passes, in a separate thread
    calm_masks: int = 8  # consecutive fast masks until they are computed within the pass again; doubles
    free_per_token: float = 0.01  # allowance per generated token
    request_excess: float = 1.0  # maximum use of a request above its tokens' allowance
    tenant_excess: float = 5.0  # maximum use above the allowance, over all requests of a tenant
    tenant_refill: float = 0.1  # CPU seconds by which a tenant's use decreases per second


def parser_limits() -> "LLParserLimits":
    """Return llguidance's own limits. A mask of 8,000 items takes about 0.1 s for the most ambiguous grammars."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=8_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=8_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


_MAX_SHOWN = 10**12  # errors show larger counts rounded, or as "too many"

_BOUNDS = {"Items": "items", "Length": "length", "Properties": "property_count"}
"""The field of `CountLimits` for keywords that begin with min or max."""

_BRANCHES = ("anyOf", "oneOf", "allOf")

_SYMBOLS = re.compile(
    r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}|~\s*(\d+)\s*(?:\.\.\s*(\d+))?|[()\[\]]|[^\s()\[\]{}~|*+?]+"
)


def check_counts(wanted: StructuredOutputs) -> None:
    """Raise `RequestError` for counts, sizes and repetitions beyond the limits."""
    SchemaCounts(wanted.form).check(wanted)


class SchemaCounts:
    """Counts over all schemas, expressions and grammars of one request."""

    def __init__(self, form: str) -> None:
        """`form` is the key of the response format, for errors."""
        self._form = form
        self._limits = CountLimits()
        self._totals: Counter[str] = Counter()  # by field of `CountLimits`

    def check(self, wanted: StructuredOutputs) -> None:
        """Count everything in a response format; raise `RequestError` at the first limit."""
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
        self._check_size("" if name == self._form else f"{name}: ", regex_size(regex))

    def _check_grammar(self, grammar: str) -> None:
        rules: list[str] = []
        for part in parts(grammar):
            if part.kind is Kind.SCHEMA:
                self._check_schema(part.value)
            elif part.kind is Kind.REGEX:
                self._check_regex("grammar", part.text)
            rules.append(part.text if part.kind is Kind.RULES else " x ")
        self._check_size("", count_expanded(_symbols("".join(rules))))

    def _check_size(self, where: str, size: int) -> None:
        self._check("expanded", f"{where}symbols with all repetitions written out", size)

    def _check_schema(self, schema: object) -> None:
        for keyword, value in keywords(schema):
            self._check_keyword(keyword, value)

    def _check_keyword(self, keyword: str, value: Any) -> None:  # noqa: ANN401 - any JSON
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        number = max(value, 0) if is_number else 0
        if keyword[:3] in ("min", "max") and (limit := _BOUNDS.get(keyword[3:])):
            self._bound(keyword, number, getattr(self._limits, limit))
            if limit == "items":
                self._check("items_in_all", "minItems and maxItems of all arrays", number)
        elif keyword == "multipleOf" and number:
            digits = Decimal(repr(number)).normalize().as_tuple().digits
            without_point = int("".join(map(str, digits)))
            self._bound("multipleOf without its decimal point", without_point, self._limits.multiple)
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
        """Raise `RequestError` if one value is over its limit."""
        if number > most:
            shown = int(number) if number < _MAX_SHOWN else f"{Decimal(number).normalize():.3g}"
            raise refusal(f"{self._form}: {keyword} is {shown}, the limit is {most}; lower it")

    def _check(self, limit: str, what: str, number: float) -> None:
        """Add to a total of the request; raise `RequestError` if it is over its limit."""
        self._totals[limit] += int(min(number, _MAX_SHOWN))
        most = getattr(self._limits, limit)
        if self._totals[limit] > most:
            shown = self._totals[limit] if self._totals[limit] < _MAX_SHOWN else "too many"
            raise refusal(f"{self._form}: {what}: {shown}, the limit is {most}; make it smaller")


def _symbols(rules: str) -> Iterator[str | int]:
    """Yield the symbols of a grammar's rules as `count_expanded` expects them."""
    for match in _SYMBOLS.finditer(rules):
        if match[1] or match[3]:  # a count: {2,5} in GBNF, ~2..5 in Lark
            yield copies(match[1] or match[3], match[2] or match[4])
        else:  # Lark's brackets are groups, too
            yield {"[": "(", "]": ")"}.get(match[0], match[0])
