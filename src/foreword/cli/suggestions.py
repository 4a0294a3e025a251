"""Suggests a command for an unknown name."""

from difflib import get_close_matches
from typing import Any

from typer.core import TyperGroup

KNOWN_ELSEWHERE = {
    "list": ("models",),  # ollama
    "ls": ("models",),
    "ps": ("top",),
    "show": ("models", "doctor"),
    "complete": ("generate",),  # vLLM
    "collect-env": ("doctor",),
    "cli": ("chat", "generate"),  # llama.cpp
    "llama-cli": ("chat", "generate"),
    "server": ("serve",),
    "llama-server": ("serve",),
    "completion": ("generate",),
    "download": ("pull",),
    "fetch": ("pull",),
    "info": ("doctor",),
    "status": ("top", "doctor"),
    "version": ("--version",),
}
"""Commands of vLLM, llama.cpp and ollama, and their equivalents here."""

CUTOFF = 0.7
"""Minimum difflib similarity: one wrong letter in four, or two swapped ones."""


def suggested(name: str, commands: list[str]) -> list[str]:
    """Return the commands that a user who typed `name` probably means; empty if none is close."""
    known = KNOWN_ELSEWHERE.get(name.lower())
    return list(known) if known else get_close_matches(name, commands, cutoff=CUTOFF)


class SuggestingGroup(TyperGroup):
    """The root command, which suggests a command for an unknown name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - typer's own click types
        """Return the command, or fail with a suggestion."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            found = " or ".join(repr(one) for one in suggested(name, self.list_commands(ctx)))
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {found}?" if found else ""))
        return super().resolve_command(ctx, args)
