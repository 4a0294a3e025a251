"""One name, one thing: no public class name is used twice in the package."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "foreword"
COMMANDS = SOURCE / "cli"
"""Classes here are commands, named as users type them; nothing imports them by name."""


def repeated_classes(source: Path, left_out: Path) -> dict[str, list[str]]:
    """Return the public top-level classes that several modules define, with these modules."""
    found = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            if is_public and not path.is_relative_to(left_out):
                found[node.name].append(path.relative_to(source).as_posix())
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_no_class_name_is_used_twice():
    assert repeated_classes(SOURCE, COMMANDS) == {}


def test_repeated_names_are_found(tmp_path: Path):
    for name in ("a.py", "b.py", "cli/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(
            "class Outcome:\n    class Inner: ...\nclass _Own: ...\n", encoding="utf-8"
        )
    assert repeated_classes(tmp_path, tmp_path / "cli") == {"Outcome": ["a.py", "b.py"]}
