"""Prints the diagram of docs/design.md: which package imports which, without arrows that follow from others."""

import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {"__main__", "cancellation", "errors", "paths", "progress"}
"""Small modules that everything may import, and the entry point."""


def imports() -> dict[str, set[str]]:
    """Return the packages of foreword that each package imports directly."""
    graph = grimp.build_graph("foreword")
    names = sorted(
        child.split(".")[1]
        for child in graph.find_children("foreword")
        if child.split(".")[1] not in LEFT_OUT
    )

    def does_import(one: str, other: str) -> bool:
        return one != other and graph.direct_import_exists(
            importer=f"foreword.{one}", imported=f"foreword.{other}", as_packages=True
        )

    return {one: {other for other in names if does_import(one, other)} for one in names}


def reached(start: str, direct: dict[str, set[str]]) -> set[str]:
    """Return all packages that `start` imports, directly or through others; `direct` has the direct imports."""
    return direct[start].union(*(reached(other, direct) for other in direct[start]))


def diagram() -> str:
    """Return the arrows as a mermaid flowchart."""
    direct = imports()
    lines = []
    for package, others in direct.items():
        arrows = sorted(other for other in others if not any(other in reached(via, direct) for via in others))
        if arrows:
            lines.append(f"    {package} --> {' & '.join(arrows)}")
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


if __name__ == "__main__":
    sys.stdout.write(diagram() + "\n")
