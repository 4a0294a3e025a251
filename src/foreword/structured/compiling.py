"""Compiles a grammar and tries its first tokens."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from foreword.errors import RequestError
from foreword.structured.compiled import CompiledGrammar, GrammarTokens
from foreword.structured.grammar_text import grammar_text
from foreword.structured.limits import parser_limits
from foreword.structured.params import StructuredOutputs
from foreword.structured.state import GrammarError, GrammarState, unpacked

if TYPE_CHECKING:
    from llguidance import LLTokenizer

TRIED_TOKENS = 4  # number of answer tokens tried after compilation


def compiled(wanted: StructuredOutputs, tokens: GrammarTokens, tokenizer: "LLTokenizer") -> CompiledGrammar:
    """Compile a response format; raise `RequestError` with the reason if it is invalid."""
    from llguidance import LLMatcher

    def matcher_of(outputs: StructuredOutputs, names: frozenset[str] = frozenset()) -> LLMatcher:
        return LLMatcher(tokenizer, grammar_text(outputs, names), log_level=0, limits=parser_limits())

    matcher = matcher_of(wanted, tokens.control_names)
    if matcher.is_error():
        where = failing_alternative(wanted, lambda outputs: bool(matcher_of(outputs).is_error()))
        why = one_line(matcher.get_error())
        raise RequestError(f"structured outputs: {wanted.form}: {where}{why}")
    return CompiledGrammar(matcher, tokens)


def try_first_tokens(grammar: CompiledGrammar, form: str) -> None:
    """Generate the first tokens of an answer; raise `RequestError` for a grammar that is too complex or fits no text.

    Also store the first mask in the grammar. Most grammars that are too complex fail within these tokens.
    """
    state = GrammarState(grammar)
    for position in range(TRIED_TOKENS):
        masks = state.masks((), ())
        possible = np.flatnonzero(unpacked(masks, grammar.tokens.size)[0])
        if state.error is not None or not len(possible):
            raise RequestError(
                f"structured outputs: {form}: {one_line(state.error or 'no text fits the grammar')}"
            )
        if position == 0:
            grammar.first_mask = masks[0]
        if set(possible.tolist()) <= grammar.ends:
            return
        next_token = [token for token in state.forced(1) or possible.tolist() if token not in grammar.ends][
            :1
        ]
        try:
            state.commit(next_token)
        except GrammarError as error:
            raise RequestError(f"structured outputs: {form}: {one_line(str(error))}") from None


_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")


def one_line(error: str) -> str:
    """Return an error of the parser in one line, with advice for known ones."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["it cannot be compiled"]
    unsupported = _UNSUPPORTED.search(lines[0])
    if unsupported:
        return f"the schema uses {unsupported[1]}, which is not supported"
    if lines[0].startswith("oneOf constraints"):
        return 'the schema uses "oneOf" with cases that overlap, which is not supported; use "anyOf"'
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join((reasons or lines)[0].split())[:300]


_JSON = "%json "  # precedes a schema in a Lark grammar


def failing_alternative(wanted: StructuredOutputs, fails: Callable[[StructuredOutputs], bool]) -> str:
    """Return the title of the first alternative that fails alone, with a colon; empty if none fails."""
    for title, schema in _titled(wanted):
        try:
            is_bad = fails(StructuredOutputs(json=schema))
        except RequestError:
            is_bad = True
        if is_bad:
            return f"{title}: "
    return ""


def _titled(wanted: StructuredOutputs) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the titles and schemas of the alternatives, which are tools in requests with tool calls."""
    for schema in _schemas(wanted):
        inner = _value_of(schema, "items") or schema
        alternatives = _value_of(inner, "anyOf")
        for alternative in alternatives if isinstance(alternatives, list) else ():
            if isinstance(title := _value_of(alternative, "title"), str):
                yield title, alternative


def _schemas(wanted: StructuredOutputs) -> list[Any]:
    """Return the schemas inside a grammar or structural tag."""
    if wanted.structural_tag is not None:
        return [
            _value_of(tag, "schema")
            for tag in _value_of(json.loads(str(wanted.structural_tag)), "structures") or ()
        ]
    grammar = wanted.grammar or ""
    begin = grammar.find(_JSON)
    try:
        return [] if begin < 0 else [json.JSONDecoder().raw_decode(grammar, begin + len(_JSON))[0]]
    except (ValueError, RecursionError):
        return []


def _value_of(value: object, key: str) -> Any:  # noqa: ANN401 - any JSON
    return value.get(key) if isinstance(value, dict) else None
