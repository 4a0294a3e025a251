"""Prompts for training texts: prompts of files, and the token ids that a chat template adds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foreword.errors import RequestError, TokenizerError
from foreword.models.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class FilePrompt:
    """Messages of a user and their category; answers in files are not used."""

    kind: str
    turns: tuple[str, ...]  # user messages, at least one
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return the first turn as a conversation."""
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*opening, {"role": "user", "content": self.turns[0]}]


def read_prompt_file(path: Path) -> list[FilePrompt]:
    """Return one prompt per non-blank line; an error names the line."""
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
            user_turns = value[key] if isinstance(value[key], list) else [value[key]]
            return _prompt(kind, user_turns)
    if "messages" in value:
        return _conversation(kind, value["messages"], "role", ("user",), "content")
    if "conversations" in value:
        return _conversation(kind, value["conversations"], "from", ("human", "user"), "value")
    raise ValueError("none of prompt, turns, question, messages, conversations")


def _conversation(kind: str, turns: object, who: str, users: tuple[str, ...], what: str) -> FilePrompt:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("turns that are no list of objects")
    user_turns = [turn.get(what) for turn in turns if turn.get(who) in users]
    system = next((turn.get(what) for turn in turns if turn.get(who) == "system"), None)
    return _prompt(kind, user_turns, None if system is None else _text(system))


def _prompt(kind: str, user_turns: list[object], system: str | None = None) -> FilePrompt:
    if not user_turns:
        raise ValueError("no turn of a user")
    return FilePrompt(kind, tuple(_text(turn) for turn in user_turns), system)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not a text but {json.dumps(value):.20}")
    if not value.strip():
        raise ValueError("an empty text")
    return value


_CONTENT = "Apple"


@dataclass(frozen=True)
class ChatPieces:
    """Token ids that a chat template puts around the messages of a conversation."""

    openings: tuple[tuple[int, ...], ...]  # before the first user message; the first has no system prompt
    to_answer: tuple[int, ...]  # between a user message and the answer
    to_user: tuple[int, ...]  # between an answer and the next user message

    def after_answer(self, answer: Sequence[int]) -> tuple[int, ...]:
        """Return `to_user` without the end token if the answer has it already."""
        if answer and self.to_user and answer[-1] == self.to_user[0]:
            return self.to_user[1:]
        return self.to_user


def chat_pieces(tokenizer: Tokenizer, system_prompts: Sequence[str] = ()) -> ChatPieces:
    """Return the token ids around the messages, by rendering a conversation of known messages."""
    if tokenizer.chat_template is None:
        raise TokenizerError(
            "the model has no chat template, without which it cannot write conversations; use an instruct model"
        )
    content = _content(tokenizer)
    user, assistant = {"role": "user", "content": _CONTENT}, {"role": "assistant", "content": _CONTENT}
    parts = _cut(tokenizer.encode_chat([user, assistant, user]), content)
    if len(parts) != 4:
        raise TokenizerError(
            "the model's chat template changes the messages, so that conversations cannot be put together from "
            "its parts; use a model whose template keeps them"
        )
    openings = [parts[0]]
    for text in system_prompts:
        try:
            openings.append(opening_with(tokenizer, text))
        except TokenizerError:  # some templates do not support a system prompt
            continue
    return ChatPieces(tuple(openings), parts[1], parts[2])


def opening_with(tokenizer: Tokenizer, system: str) -> tuple[int, ...]:
    """Return the token ids before the first user message, with this system prompt."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": _CONTENT}]
    parts = _cut(tokenizer.encode_chat(messages), _content(tokenizer))
    # The system prompt may contain the word too; the last occurrence is the user's message.
    return tuple(token for part in parts[:-2] for token in (*part, *_content(tokenizer))) + parts[-2]


def _content(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(_CONTENT, add_special_tokens=False)


def _cut(tokens: list[int], content: list[int]) -> list[tuple[int, ...]]:
    """Return the token ids between occurrences of `content`."""
    runs: list[tuple[int, ...]] = []
    begin = place = 0
    while place <= len(tokens) - len(content):
        if tokens[place : place + len(content)] == content:
            runs.append(tuple(tokens[begin:place]))
            begin = place = place + len(content)
        else:
            place += 1
    runs.append(tuple(tokens[begin:]))
    return runs
