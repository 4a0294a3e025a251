"""The limits of structured outputs: what a grammar may contain, and what it may cost to compile and to follow."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits


@dataclass(frozen=True)
class CountLimits:
    """What a schema, a regular expression or a grammar may contain. Checked on its text, before it is compiled."""

    items: int = 10_000  # minItems and maxItems: the parser builds a symbol for every item
    items_in_all: int = 20_000  # of all arrays of a schema together
    length: int = 1_000_000  # minLength and maxLength
    property_count: int = 10_000  # minProperties and maxProperties
    properties: int = (
        2_000  # keys of all objects of a schema; compiling takes time in proportion to their square
    )
    enum_values: int = 10_000  # of all enums of a schema
    branches: int = 2_000  # of anyOf, oneOf and allOf together
    multiple: int = (
        10_000  # digits of multipleOf as a whole number: the parser builds a state for every remainder
    )
    expanded: int = 300_000  # size of an expression or a rule once counted repetitions are written out


@dataclass(frozen=True)
class CompileLimits:
    """What compiling a grammar may cost. Enforced on a process of its own, which the system ends."""

    cpu_seconds: float = 2.0
    patience: int = (
        12  # times the processor seconds: the wall-clock limit on a machine that is busy otherwise
    )
    memory_bytes: int = 96 << 20  # beyond what the process has before it compiles
    at_once: int = 4  # grammars that are compiled at the same time
    at_once_per_tenant: int = 2  # of these, those of one tenant


@dataclass(frozen=True)
class MaskLimits:
    """What following a grammar may cost, in processor seconds."""

    one_mask: float = 0.1  # a request whose mask at some token takes longer is ended
    slow_mask: float = 0.005  # from here on masks are computed between the passes, in a thread of their own
    calm_masks: int = (
        8  # fast masks in a row after which they are computed in the pass again; doubles each time
    )
    free_per_token: float = 0.01  # what every generated token may cost
    request_excess: float = 1.0  # what a request may use beyond that
    tenant_excess: float = 5.0  # what all requests of a tenant may use beyond that
    tenant_refill: float = 0.1  # how much of it comes back every second


def parser_limits() -> "LLParserLimits":
    """Return the parser's own limits on compiling a grammar and on each mask.

    A mask with 8,000 items takes at most about 0.1 s, for the most ambiguous grammars.
    """
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
