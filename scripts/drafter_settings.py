"""Prints the table of docs/drafters.md with the settings of all drafters, from their registry."""

import json
import sys
from dataclasses import MISSING, Field, fields
from typing import Any

from foreword.drafters.names import OWN_METHODS
from foreword.drafters.registry import drafter_kinds
from foreword.speculation.settings import HELP


def shown_default(one: Field[Any]) -> str:
    if one.default is MISSING:
        return "required"
    return "" if one.default in ("", None) else json.dumps(one.default)


def table() -> str:
    """Return one line per key; drafters whose key means the same share one."""
    methods: dict[tuple[str, str, str], list[str]] = {}
    for name in OWN_METHODS:
        for one in fields(drafter_kinds()[name].settings):
            methods.setdefault((one.name, shown_default(one), one.metadata[HELP]), []).append(f"`{name}`")
    lines = [
        f"| `{key}` | {', '.join(names)} | {default} | {text} |"
        for (key, default, text), names in methods.items()
    ]
    return "\n".join(["| key | drafters | default | meaning |", "| --- | --- | --- | --- |", *lines])


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
