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
    content = tokenizer.encode(_CONTENT, add_special_tokens=False)
    user, assistant = {"role": "user", "content": _CONTENT}, {"role": "assistant", "content": _CONTENT}
    parts = _cut(tokenizer.encode_chat([user, assistant, user]), content)
    if len(parts) != 4:
        raise TokenizerError(
            "the model's chat template changes what it is given, so that prompts cannot be made from its parts; "
            "give prompts with --prompts and --only-prompts"
        )
    openings = [parts[0]]
    for text in system_prompts:
        try:
            rendered = tokenizer.encode_chat([{"role": "system", "content": text}, user])
        except TokenizerError:  # some templates have no place for one
            continue
        openings.append(_cut(rendered, content)[0])
    return ChatPieces(tuple(openings), parts[1], parts[2])


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
