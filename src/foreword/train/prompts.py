"""Prompts from files of JSON lines: plain prompts, chat turns, ShareGPT."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.errors import RequestError


@dataclass(frozen=True)
class FilePrompt:
    """What a user said first, and the kind of work that it is."""

    kind: str
    text: str


def read_prompt_file(path: Path) -> list[FilePrompt]:
    """One prompt for every line that is not blank; a line that is none is refused by its number."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompts file {path} cannot be read as text: {error}") from None
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_parse(json.loads(line), path.stem))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(f"{path}, line {number}: no prompt in it ({error})") from None
    if not prompts:
        raise RequestError(f"prompts file {path} has no prompts in it")
    return prompts


def _parse(value: dict[str, Any], default_kind: str) -> FilePrompt:
    kind = str(value.get("category", default_kind))
    if "turns" in value:
        return FilePrompt(kind, _text(value["turns"][0]))
    if "prompt" in value:
        return FilePrompt(kind, _text(value["prompt"]))
    if "question" in value:
        return FilePrompt(kind, _text(value["question"]))
    if "messages" in value:
        return FilePrompt(kind, _first(value["messages"], "role", "user", "content"))
    if "conversations" in value:
        return FilePrompt(kind, _first(value["conversations"], "from", "human", "value"))
    raise ValueError("none of prompt, turns, question, messages, conversations")


def _first(turns: list[dict[str, Any]], who: str, user: str, what: str) -> str:
    return _text(next((turn[what] for turn in turns if turn.get(who) in (user, "user")), None))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("an empty text")
    return value
