"""Compiles a response format: converts it to a grammar's text, compiles this, and tries its first tokens."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from foreword.errors import RequestError
from foreword.structured.compiled import CompiledGrammar, GrammarTokens
from foreword.structured.dialects import (
    MAP_KEYWORDS,
    VALUE_KEYWORDS,
    EcmaPattern,
    GrammarPart,
    Kind,
    parts,
    with_ascii_classes,
)
from foreword.structured.limits import parser_limits
from foreword.structured.params import StructuredOutputs, refusal
from foreword.structured.state import GrammarError, GrammarState, unpacked

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

TRIED_TOKENS = 4  # number of answer tokens tried after compilation


def compiled(wanted: StructuredOutputs, tokens: GrammarTokens, tokenizer: "LLTokenizer") -> CompiledGrammar:
    """Compile a response format; raise `RequestError` with the reason if it is invalid."""
    from llguidance import LLMatcher

    def matcher_of(outputs: StructuredOutputs, names: frozenset[str] = frozenset()) -> LLMatcher:
        try:
            text = _grammar_text(outputs, names)
        except RecursionError:
            raise refusal(f"{outputs.form} is nested too deeply") from None
        return LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())

    matcher = matcher_of(wanted, tokens.control_names)
    if matcher.is_error():
        where = failing_alternative(wanted, lambda outputs: bool(matcher_of(outputs).is_error()))
        why = one_line(matcher.get_error())
        raise refusal(f"{wanted.form}: {where}{why}")
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
            raise refusal(f"{form}: {one_line(state.error or 'no text fits the grammar')}")
        if position == 0:
            grammar.first_mask = masks[0]
        candidates = state.forced(1) or possible.tolist()
        next_token = next((token for token in candidates if token not in grammar.end_ids), None)
        if next_token is None:  # only end tokens may follow
            return
        try:
            state.commit([next_token])
        except GrammarError as error:
            raise refusal(f"{form}: {one_line(str(error))}") from None


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
    """Yield the title and schema of each alternative; in requests with tool calls an alternative is a tool."""
    for schema in _schemas(wanted):
        inner = _value_of(schema, "items") or schema
        alternatives = _value_of(inner, "anyOf")
        for alternative in alternatives if isinstance(alternatives, list) else ():
            if isinstance(title := _value_of(alternative, "title"), str):
                yield title, alternative


def _schemas(wanted: StructuredOutputs) -> list[Any]:
    """Return the schemas inside a grammar or structural tag."""
    if wanted.structural_tag is not None:
        structures = _value_of(json.loads(str(wanted.structural_tag)), "structures")
        return [_value_of(structure, "schema") for structure in structures or ()]
    grammar = wanted.grammar or ""
    begin = grammar.find(_JSON)
    try:
        return [] if begin < 0 else [json.JSONDecoder().raw_decode(grammar, begin + len(_JSON))[0]]
    except (ValueError, RecursionError):
        return []


def _value_of(value: object, key: str) -> Any:  # noqa: ANN401 - any JSON
    """Return the value of a key; None if there is none or `value` is not an object."""
    return value.get(key) if isinstance(value, dict) else None


def _grammar_text(wanted: StructuredOutputs, control_names: Collection[str]) -> str:
    """Return the text of a response format's grammar; ordinary text tokens cannot spell the names of control tokens."""
    from llguidance import LLMatcher

    if wanted.json_object:
        return _from_schema({"type": "object"}, wanted)
    if wanted.json is not None:
        return _from_schema(json.loads(str(wanted.json)), wanted)
    if wanted.regex is not None:
        return str(LLMatcher.grammar_from_regex(with_ascii_classes(wanted.regex)))
    if wanted.choice is not None:
        # One expression instead of one rule per choice: a parser has room for a few thousand rules.
        return str(LLMatcher.grammar_from_regex("|".join(map(re.escape, wanted.choice))))
    if wanted.grammar is not None:
        return _from_ebnf(wanted.grammar)
    return _from_tags(json.loads(str(wanted.structural_tag)), control_names)


def schema_options(wanted: StructuredOutputs) -> "JsonCompileOptions":
    """Return options for the white space of JSON: that of Python's `json.dumps` unless the request sets another.

    With arbitrary whitespace, small models may emit nothing else, and no token between keys would be forced.
    """
    pattern = wanted.whitespace_pattern
    space = "" if wanted.disable_any_whitespace else " "
    return {
        "lenient": False,
        "coerce_one_of": False,
        "whitespace_flexible": pattern is not None,
        "whitespace_pattern": None if pattern is None else with_ascii_classes(pattern),
        "item_separator": "," if pattern is not None else f",{space}",
        "key_separator": ":" if pattern is not None else f":{space}",
    }


def _from_schema(schema: Any, wanted: StructuredOutputs) -> str:  # noqa: ANN401 - any JSON
    from llguidance import LLMatcher

    if wanted.disable_additional_properties:
        schema = _closed(schema)
    written = json.dumps(with_parser_patterns(schema), ensure_ascii=False)
    return str(LLMatcher.grammar_from_json_schema(written, overrides=schema_options(wanted)))


def _closed(schema: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return the schema with `additionalProperties: false` in every object with properties that does not specify it."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(entry) for key, entry in schema.items()}
    if "properties" in closed and "additionalProperties" not in closed:
        closed["additionalProperties"] = False
    return closed


def with_parser_patterns(schema: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return the schema with every ECMA-262 pattern translated to the parser's syntax."""
    if isinstance(schema, list):
        return [with_parser_patterns(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {keyword: _with_parser_patterns(keyword, value) for keyword, value in schema.items()}


def _with_parser_patterns(keyword: str, value: Any) -> Any:  # noqa: ANN401 - any JSON
    if keyword in VALUE_KEYWORDS:
        return value
    if keyword == "pattern" and isinstance(value, str):
        return EcmaPattern(value).translated()
    if keyword in MAP_KEYWORDS and isinstance(value, dict):
        is_pattern = keyword == "patternProperties"
        named = {
            EcmaPattern(name).translated() if is_pattern else name: with_parser_patterns(entry)
            for name, entry in value.items()
        }
        if len(named) < len(value):
            raise refusal("patternProperties has two patterns with the same meaning; join them")
        return named
    return with_parser_patterns(value)


def _from_ebnf(text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the converter raises arbitrary exceptions for invalid grammars
        reason = " ".join(str(error).split()) or type(error).__name__
        raise refusal(f"grammar cannot be read: {reason[:300]}") from None
    return str(LLMatcher.grammar_from_lark("".join(map(_rewritten, parts(lark)))))


def _rewritten(part: GrammarPart) -> str:
    """Return the text of a part, with regular expressions and patterns translated to the parser's syntax."""
    if part.kind is Kind.REGEX:
        return f"/{with_ascii_classes(part.text[1:-1])}/"
    if part.kind is Kind.SCHEMA:
        return json.dumps(with_parser_patterns(part.value), ensure_ascii=False)
    return part.text


def _from_tags(given: Mapping[str, Any], control_names: Collection[str]) -> str:
    """Convert `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, the format of vLLM and xgrammar."""
    from llguidance import StructTag

    triggers, structures = given.get("triggers"), given.get("structures")
    if not _are_texts(triggers) or not isinstance(structures, list) or not structures:
        raise refusal(
            'structural_tag needs "structures", a list of {"begin", "schema", "end"}, and '
            '"triggers", a list of texts'
        )
    tags = [_tag(index, entry, triggers) for index, entry in enumerate(structures)]
    are_special = {tag.trigger in control_names for tag in tags}
    if len(are_special) > 1:
        raise refusal("structural_tag: either all triggers are control tokens or none is")
    return str(StructTag.to_grammar(tags, assume_special=True in are_special))


def _tag(index: int, entry: Any, triggers: list[str]) -> Any:  # noqa: ANN401 - any JSON; StructTag
    """Return llguidance's `StructTag` of the structure with this index."""
    from llguidance import StructTag

    name = f"structural_tag: structure {index}"
    if not isinstance(entry, dict) or not isinstance(entry.get("begin"), str):
        raise refusal(f'{name}: "begin" must be a text')
    end, schema = entry.get("end", ""), entry.get("schema")
    if not isinstance(end, str):
        raise refusal(f'{name}: "end" must be a text')
    if not isinstance(schema, dict):
        fault = "has no schema" if schema is None else "has a schema that is not an object"
        raise refusal(f'{name} {fault}: give a JSON schema as "schema", {{}} for any JSON')
    trigger = next((text for text in triggers if entry["begin"].startswith(text)), None)
    if trigger is None:
        raise refusal(f'{name}: "begin" starts with none of the triggers')
    return StructTag(trigger=trigger, begin=entry["begin"], grammar=with_parser_patterns(schema), end=end)


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)
