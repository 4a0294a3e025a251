"""Prompts from files of JSON lines: plain prompts, chat turns, ShareGPT."""

import json
from dataclasses import dataclass
from pathlib import Path

from foreword.errors import RequestError


@dataclass(frozen=True)
class FilePrompt:
    """What a user says, turn by turn, and the kind of work that it is. Answers in files are not used."""

    kind: str
    turns: tuple[str, ...]  # at least one
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """The first turn as a conversation."""
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*opening, {"role": "user", "content": self.turns[0]}]


def read_prompt_file(path: Path) -> list[FilePrompt]:
    """One prompt for every line that is not blank; a line that is none is refused by its number."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"prompts file {path} cannot be read as text: {reason}") from None
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_parse(json.loads(line), path.stem))
        except json.JSONDecodeError as error:
            raise RequestError(f"{path}, line {number}: not JSON ({error.msg})") from None
        except RecursionError:
            raise RequestError(f"{path}, line {number}: JSON that is too deep") from None
        except ValueError as error:
            raise RequestError(f"{path}, line {number}: no prompt in it ({error})") from None
    if not prompts:
        raise RequestError(f"prompts file {path} has no prompts in it")
    return prompts


def _parse(value: object, default_kind: str) -> FilePrompt:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    kind = str(value.get("category", default_kind))
    for key in ("turns", "prompt", "question"):
        if key in value:
            said = value[key] if isinstance(value[key], list) else [value[key]]
            return _prompt(kind, said)
    if "messages" in value:
        return _conversation(kind, value["messages"], "role", ("user",), "content")
    if "conversations" in value:
        return _conversation(kind, value["conversations"], "from", ("human", "user"), "value")
    raise ValueError("none of prompt, turns, question, messages, conversations")


def _conversation(kind: str, turns: object, who: str, users: tuple[str, ...], what: str) -> FilePrompt:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("turns that are no list of objects")
    said = [turn.get(what) for turn in turns if turn.get(who) in users]
    system = next((turn.get(what) for turn in turns if turn.get(who) == "system"), None)
    return _prompt(kind, said, None if system is None else _text(system))


def _prompt(kind: str, said: list[object], system: str | None = None) -> FilePrompt:
    if not said:
        raise ValueError("no turn of a user")
    return FilePrompt(kind, tuple(_text(turn) for turn in said), system)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not a text but {json.dumps(value):.20}")
    if not value.strip():
        raise ValueError("an empty text")
    return value
