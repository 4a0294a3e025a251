"""A chat template as runs of token ids, so that texts the model wrote go into prompts as the tokens they are."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.errors import TokenizerError
from foreword.models.tokenization.tokenizer import Tokenizer

_CONTENT = "Apple"


@dataclass(frozen=True)
class ChatPieces:
    """What stands around the contents of a conversation."""

    openings: tuple[tuple[int, ...], ...]  # before the first user's words: without and with system prompts
    to_answer: tuple[int, ...]  # between a user's words and the answer
    to_user: tuple[int, ...]  # between an answer and the next user's words

    def after_answer(self, answer: Sequence[int]) -> tuple[int, ...]:
        """`to_user` without the end token that the answer has already."""
        if answer and self.to_user and answer[-1] == self.to_user[0]:
            return self.to_user[1:]
        return self.to_user


def chat_pieces(tokenizer: Tokenizer, system_prompts: Sequence[str] = ()) -> ChatPieces:
    """Cut a rendered conversation at its contents."""
    if tokenizer.chat_template is None:
        raise TokenizerError(
            "the model has no chat template, without which it cannot write conversations; use an instruct model"
        )
    content = _content(tokenizer)
    user, assistant = {"role": "user", "content": _CONTENT}, {"role": "assistant", "content": _CONTENT}
    parts = _cut(tokenizer.encode_chat([user, assistant, user]), content)
    if len(parts) != 4:
        raise TokenizerError(
            "the model's chat template changes what it is given, so that conversations cannot be put together from "
            "its parts; use a model whose template keeps them"
        )
    openings = [parts[0]]
    for text in system_prompts:
        try:
            openings.append(opening_with(tokenizer, text))
        except TokenizerError:  # some templates have no place for one
            continue
    return ChatPieces(tuple(openings), parts[1], parts[2])


def opening_with(tokenizer: Tokenizer, system: str) -> tuple[int, ...]:
    """What stands before the first user's words after this system prompt."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": _CONTENT}]
    parts = _cut(tokenizer.encode_chat(messages), _content(tokenizer))
    # The system prompt may have the word in it: the user's is the last.
    return tuple(token for part in parts[:-2] for token in (*part, *_content(tokenizer))) + parts[-2]


def _content(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(_CONTENT, add_special_tokens=False)


def _cut(tokens: list[int], content: list[int]) -> list[tuple[int, ...]]:
    """The runs between the places where `content` stands."""
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
