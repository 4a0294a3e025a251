"""Prompts for training texts: prompts read from files, and the token ids that a chat template adds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foreword.errors import RequestError, TokenizerError
from foreword.models.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class FilePrompt:
    """The user messages of one conversation; answers in the file are not read."""

    kind: str  # category, such as math; by default the name of the file
    turns: tuple[str, ...]  # user messages, at least one
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return a conversation of the system prompt, if there is one, and the first user message."""
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
            raise RequestError(f"{path}, line {number}: not a prompt ({error})") from None
    if not prompts:
        raise RequestError(f"prompts file {path} has no prompts; write one JSON object per line")
    return prompts


def _parse(value: object, default_kind: str) -> FilePrompt:
    """Return the prompt of a parsed line; the formats of MT-bench, OpenAI and ShareGPT are accepted."""
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    kind = str(value.get("category", default_kind))
    for key in ("turns", "prompt", "question"):
        if key in value:
            user_turns = value[key] if isinstance(value[key], list) else [value[key]]
            return _prompt(kind, user_turns)
    if "messages" in value:
        return _conversation(kind, value, "messages", "role", ("user",), "content")
    if "conversations" in value:
        return _conversation(kind, value, "conversations", "from", ("human", "user"), "value")
    raise ValueError("it has none of the keys prompt, turns, question, messages, conversations")


def _conversation(
    kind: str, line: dict[str, object], key: str, role_key: str, user_roles: tuple[str, ...], text_key: str
) -> FilePrompt:
    """Return the prompt from the messages in `line[key]`, whose role and text have these keys."""
    messages = line[key]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{key} is not a list of objects")
    user_turns = [message.get(text_key) for message in messages if message.get(role_key) in user_roles]
    system = next((message.get(text_key) for message in messages if message.get(role_key) == "system"), None)
    return _prompt(kind, user_turns, None if system is None else _text(system))


def _prompt(kind: str, user_turns: list[object], system: str | None = None) -> FilePrompt:
    if not user_turns:
        raise ValueError("no user message")
    return FilePrompt(kind, tuple(_text(turn) for turn in user_turns), system)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a message is {json.dumps(value):.20}, not a text")
    if not value.strip():
        raise ValueError("a message is empty")
    return value


_MARKER = "Apple"
"""Text of every message in a rendered sample conversation. The token ids are split at the marker's tokens."""


@dataclass(frozen=True)
class ChatPieces:
    """Token ids that a chat template puts around the messages of a conversation."""

    # Before the first user message: without a system prompt, then with each of them.
    openings: tuple[tuple[int, ...], ...]
    to_answer: tuple[int, ...]  # between a user message and the answer
    to_user: tuple[int, ...]  # between an answer and the next user message

    def after_answer(self, answer: Sequence[int]) -> tuple[int, ...]:
        """Return `to_user`, without its first token if the answer ends with that token."""
        if answer and self.to_user and answer[-1] == self.to_user[0]:
            return self.to_user[1:]
        return self.to_user


def chat_pieces(tokenizer: Tokenizer, system_prompts: Sequence[str] = ()) -> ChatPieces:
    """Return the token ids around the messages, by rendering a sample conversation and splitting it at its messages."""
    if tokenizer.chat_template is None:
        raise TokenizerError(
            "the model has no chat template and cannot write conversations; use an instruct model"
        )
    user, assistant = {"role": "user", "content": _MARKER}, {"role": "assistant", "content": _MARKER}
    pieces = _split(tokenizer.encode_chat([user, assistant, user]), _marker_ids(tokenizer))
    if len(pieces) != 4:  # before, between and after the three messages
        raise TokenizerError(
            "the model's chat template does not reproduce messages literally, so its own tokens cannot be separated "
            "from them; use a model whose template does"
        )
    openings = [pieces[0]]
    for text in system_prompts:
        try:
            openings.append(_opening_with(tokenizer, text))
        except TokenizerError:  # some templates do not support a system prompt
            continue
    return ChatPieces(tuple(openings), pieces[1], pieces[2])


def _opening_with(tokenizer: Tokenizer, system: str) -> tuple[int, ...]:
    """Return the token ids before the first user message, with this system prompt."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": _MARKER}]
    marker = _marker_ids(tokenizer)
    pieces = _split(tokenizer.encode_chat(messages), marker)
    # The system prompt may contain the marker too. Its last occurrence is the user message.
    return tuple(token for piece in pieces[:-2] for token in (*piece, *marker)) + pieces[-2]


def _marker_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(_MARKER, add_special_tokens=False)


def _split(tokens: list[int], marker: list[int]) -> list[tuple[int, ...]]:
    """Split the token ids at every occurrence of `marker`."""
    pieces: list[tuple[int, ...]] = []
    begin = position = 0
    while position <= len(tokens) - len(marker):
        if tokens[position : position + len(marker)] == marker:
            pieces.append(tuple(tokens[begin:position]))
            begin = position = position + len(marker)
        else:
            position += 1
    pieces.append(tuple(tokens[begin:]))
    return pieces
