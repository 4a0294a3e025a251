"""Puts a mutant into a source text: finds a syntax node inside a function and replaces it.

Comments, line breaks and everything outside the node do not matter, so a mutant survives reformatting.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass


class NoSuchNode(ValueError):  # noqa: N818 - it names what is missing
    """The function or the node is not in the source, or the node is there more than once."""


def mutated(source: str, function: str, old: str, new: str) -> str:
    """Return the source with one node of a function replaced.

    `function` is a dotted name such as "Class.method"; "" is the module. `old` and `new` are an expression or
    statements; an empty `new` removes them.
    """
    tree = ast.parse(source)
    place_of(tree, function, old, new).put(new)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def place_of(tree: ast.Module, function: str, old: str, new: str) -> "Place":
    """Return the one place of a parsed source that `mutated` replaces."""
    places = list(_places(_definition(tree, function), old, new))
    if len(places) != 1:
        raise NoSuchNode(f"{len(places) or 'no'} nodes of {function or 'the module'} are: {old}")
    return places[0]


@dataclass(frozen=True)
class Place:
    """Where nodes can be replaced: `parent.field`, or its elements from `start` to `stop`."""

    parent: ast.AST
    field: str
    start: int | None = None
    stop: int = 0

    def put(self, text: str) -> None:
        if self.start is None:
            setattr(self.parent, self.field, _expression(text))
            return
        kept: list[ast.AST] = getattr(self.parent, self.field)
        if isinstance(kept[self.start], ast.stmt):
            kept[self.start : self.stop] = ast.parse(text).body
            kept[:] = kept or [ast.Pass()]
        else:
            kept[self.start] = _expression(text)


def _definition(tree: ast.Module, function: str) -> ast.AST:
    found: ast.AST = tree
    for name in filter(None, function.split(".")):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inside = [node for node in ast.walk(found) if isinstance(node, kinds) and node.name == name]
        if not inside:
            raise NoSuchNode(f"no function or class is called {function}")
        found = inside[-1]  # the last of several overloads has the body
    return found


def _places(within: ast.AST, old: str, new: str) -> Iterator[Place]:
    """Return where the old text occurs, in source order: as an expression if both can be one, else as statements."""
    try:
        wanted, _ = _expression(old), _expression(new)
    except SyntaxError:
        return _statements(within, [_shape(node) for node in ast.parse(old).body])
    return _expressions(within, type(wanted), _shape(wanted))


def _expressions(node: ast.AST, kind: type[ast.AST], wanted: str) -> Iterator[Place]:
    for field, value in ast.iter_fields(node):
        for place, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST):
                continue
            if type(child) is kind and _shape(child) == wanted:
                yield Place(node, field, place)
            yield from _expressions(child, kind, wanted)


def _statements(within: ast.AST, wanted: list[str]) -> Iterator[Place]:
    for node in ast.walk(within):
        for field, value in ast.iter_fields(node):
            if not (isinstance(value, list) and value and isinstance(value[0], ast.stmt)):
                continue
            shapes = [_shape(statement) for statement in value]
            for start in range(len(shapes) - len(wanted) + 1):
                if shapes[start : start + len(wanted)] == wanted:
                    yield Place(node, field, start, start + len(wanted))


def _expression(text: str) -> ast.expr:
    if not text.strip():
        raise SyntaxError("no expression")
    return ast.parse(f"({text}\n)", mode="eval").body


def _shape(node: ast.AST) -> str:
    """Return what makes two nodes equal: everything but their place in the file and whether a name is read or set."""
    return ast.dump(node).replace("ctx=Store()", "ctx=Load()").replace("ctx=Del()", "ctx=Load()")
