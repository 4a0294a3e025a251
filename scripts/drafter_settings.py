"""Prints the table of docs/drafters.md with the settings of all drafters, from their registry."""

import json
import sys
from dataclasses import MISSING, Field, fields
from typing import Any

from foreword.drafters.names import OWN_METHODS
from foreword.drafters.registry import drafter_kinds
from foreword.speculation.settings import HELP


def shown_default(setting: Field[Any]) -> str:
    if setting.default is MISSING:
        return "required"
    return "" if setting.default in ("", None) else json.dumps(setting.default)


def table() -> str:
    """Return a line per key; drafters share a line if the key has the same default and meaning for them."""
    methods: dict[tuple[str, str, str], list[str]] = {}
    for name in OWN_METHODS:
        for setting in fields(drafter_kinds()[name].settings):
            key = setting.name, shown_default(setting), setting.metadata[HELP]
            methods.setdefault(key, []).append(f"`{name}`")
    lines = [
        f"| `{key}` | {', '.join(names)} | {default} | {text} |"
        for (key, default, text), names in methods.items()
    ]
    return "\n".join(["| key | drafters | default | meaning |", "| --- | --- | --- | --- |", *lines])


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
