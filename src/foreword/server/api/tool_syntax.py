"""Parses and writes tool calls that are not JSON objects: tags for each argument, sections, Python."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foreword.server.api.call_format import Schemas

Calls = list[tuple[str, Any]]
"""(name, arguments) of calls."""


def _typed_value(text: str, schema: Mapping[str, Any], name: str) -> object:
    """Return a value that was written as text, in the type of the argument's schema."""
    properties = schema.get("properties")
    known = properties.get(name) if isinstance(properties, Mapping) else None
    kind = known.get("type") if isinstance(known, Mapping) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _argument_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parse_object(text: str) -> object:
    """Parse arguments, which must be a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    return value


def tag_functions(function: str, parameter: str, line_end: str, between: str = "") -> dict[str, Any]:
    """Return `parse` and `write` of a format with tags for each function and parameter.

    `function` and `parameter` are the opening tags, with {} for a name. `line_end` is written before and after a value,
    `between` between two calls.
    """
    tag_name = re.split("[= ]", function, maxsplit=1)[0]
    name_pattern = r'([^>"\n]+)'
    # An argument may contain the closing tag: a call ends where another begins, or the block ends.
    call = re.compile(
        rf"<{function.format(name_pattern)}>(.*?)</{tag_name}>(?=\s*(?:<{tag_name}[= ]|\Z))", re.DOTALL
    )
    pair = re.compile(rf"<{parameter.format(name_pattern)}>\n?(.*?)\n?</parameter>", re.DOTALL)

    def parse(block: str, tools: Schemas) -> Calls:
        if call.sub("", block).strip():
            raise ValueError("text between the functions")
        return [_typed_call(name, pair.findall(inside), tools) for name, inside in call.findall(block)]

    def write(calls: Sequence[tuple[str, Any]]) -> str:
        blocks = []
        for name, given in calls:
            pairs = [(parameter.format(key), _argument_text(value)) for key, value in given.items()]
            written = "".join(f"<{tag}>{line_end}{value}{line_end}</parameter>\n" for tag, value in pairs)
            blocks.append(f"\n<{function.format(name)}>\n{written}</{tag_name}>\n")
        return between.join(blocks)

    return {"parse": parse, "write": write}


_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _typed_call(name: str, pairs: Sequence[tuple[str, str]], tools: Schemas) -> tuple[str, dict[str, object]]:
    """Return (name, arguments) of a call whose argument names and values were written as text."""
    schema = tools.get(name.strip(), {})
    return name.strip(), {key.strip(): _typed_value(text, schema, key.strip()) for key, text in pairs}


def parse_pairs(block: str, tools: Schemas) -> Calls:
    """Parse a name, followed by pairs of tags for each argument's name and value."""
    name = block.strip().partition("\n")[0].partition("<arg_key>")[0]
    return [_typed_call(name, _PAIR.findall(block), tools)]


def write_pairs(calls: Sequence[tuple[str, Any]]) -> str:
    def pairs(given: Mapping[str, Any]) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_argument_text(value)}</arg_value>\n"
            for key, value in given.items()
        )

    return "</tool_call>\n<tool_call>".join(f"{name}\n{pairs(given)}" for name, given in calls)


def entry_functions(pattern: str, format_entry: Callable[[int, str, str], str]) -> dict[str, Any]:
    """Return `parse` and `write` of a format in which each call is an entry with a name and JSON arguments.

    `pattern` matches an entry, with the groups `name` and `given`; `format_entry` receives (index, name, JSON).
    """
    entry = re.compile(pattern, re.DOTALL)

    def parse(block: str, tools: Schemas) -> Calls:
        return [(found["name"].strip(), _parse_object(found["given"])) for found in entry.finditer(block)]

    def write(calls: Sequence[tuple[str, Any]]) -> str:
        return "".join(format_entry(n, name, json.dumps(given)) for n, (name, given) in enumerate(calls))

    return {"parse": parse, "write": write}


_JSON_NAMES = {"true": True, "false": False, "null": None}


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's names of constants, which some models write in Python calls."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def parse_python(block: str, tools: Schemas) -> Calls:
    """Parse a Python list of calls with named arguments."""
    listed = ast.parse(block.strip(), mode="eval").body
    if not isinstance(listed, ast.List):
        raise ValueError("no list of calls")
    calls = []
    for call in listed.elts:
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
            raise ValueError("no call with named arguments")
        given = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError("arguments without a name")
            given[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
        json.dumps(given, allow_nan=False)  # raises for sets, bytes, infinity, ...
        calls.append((ast.unparse(call.func), given))
    return calls


def python_calls(calls: Sequence[tuple[str, Any]]) -> list[str]:
    def keywords(given: Mapping[str, Any]) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in given.items())

    return [f"{name}({keywords(given)})" for name, given in calls]


def write_python(calls: Sequence[tuple[str, Any]]) -> str:
    return f"[{', '.join(python_calls(calls))}]"


def parse_python_lines(block: str, tools: Schemas) -> Calls:
    """Parse Python calls, one per line."""
    # Stripped, since Python's parser refuses other spaces than ASCII's.
    lines = [stripped for line in block.splitlines() if (stripped := line.strip())]
    return parse_python(f"[{','.join(lines)}]", tools)
