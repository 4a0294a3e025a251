"""The catalogue follows the code: a mutant that can no longer be put in would go unnoticed until `make mutants`."""

import ast
from functools import cache
from pathlib import Path

import pytest
from every import EVERY_MUTANT
from mutation import NoSuchNode, mutated, place_of

ROOT = Path(__file__).resolve().parents[2]


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / "src" / "foreword" / file).read_text("utf-8"))


def test_every_bug_can_be_put_in():
    stale = []
    for mutant in EVERY_MUTANT:
        try:
            place_of(parsed(mutant.file), mutant.function, mutant.old, mutant.new)
        except NoSuchNode as error:
            stale.append((mutant.bug, mutant.what, str(error)))
        assert ast.dump(ast.parse(mutant.old)) != ast.dump(ast.parse(mutant.new)), mutant.what
    assert not stale


def test_a_node_is_found_by_its_syntax_alone():
    text = "class A:\n    def f(self):\n        x = g(1,  # one\n              2)\n        return x\n"
    assert mutated(text, "A.f", "g(1, 2)", "g(2)") == (
        "class A:\n\n    def f(self):\n        x = g(2)\n        return x\n"
    )
    assert "x = " not in mutated(text, "A.f", "x = g(1, 2)", "")
    with pytest.raises(NoSuchNode, match="no nodes of"):
        mutated(text, "A.f", "g(1, 3)", "g(2)")
    with pytest.raises(NoSuchNode, match=r"no function or class is called A\.h"):
        mutated(text, "A.h", "g(1, 2)", "g(2)")
    with pytest.raises(NoSuchNode, match="2 nodes of"):
        mutated("a = b + b", "", "b", "c")


def test_every_named_test_is_there():
    missing = []
    for name in {name for mutant in EVERY_MUTANT for name in mutant.tests}:
        file, *functions = name.split("::")
        path = ROOT / file
        last = functions[-1].split("[")[0] if functions else ""
        if not path.exists() or (last and path.is_file() and f"{last}(" not in path.read_text("utf-8")):
            missing.append(name)
    assert not missing
