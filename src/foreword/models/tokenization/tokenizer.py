"""Tokenizer that encodes the names of control tokens in user text as plain text."""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from foreword.errors import RequestError, TokenizerError
from foreword.models.config import ModelConfig
from foreword.models.tokenization.chat_template import ChatTemplate
from foreword.models.tokenization.token_pieces import PieceDecoder, fill_tokens

# Two disjoint ranges of Unicode's private characters.
_SWAP_CHARACTERS = range(0xE000, 0xF900)  # for the first characters of control tokens' names in messages
_SECRET_CHARACTERS = range(0xF0000, 0xFFFFE)  # for the secret names of control tokens


@dataclass(frozen=True)
class TokenizerParts:
    """Format-specific parts of a tokenizer."""

    backend: tokenizers.Tokenizer  # its special added tokens are control tokens
    decode_piece: PieceDecoder  # vocabulary entry -> bytes
    strips_leading_space: bool  # decoding must remove the leading space that encoding adds
    eos_ids: frozenset[int]  # tokens that end an answer
    bos_id: int | None  # the token that begins a text; None: the model has none
    template: ChatTemplate | None  # None: the model has no chat format
    padding: int = 0  # number of padding entries at the end of the vocabulary
    fill: tuple[int, int, int] | None = None  # declared fill-in-the-middle tokens (prefix, suffix, middle)
    fill_ends: tuple[int, ...] = ()  # declared tokens that end the text in the middle


class Tokenizer:
    """A model's tokenizer. The name of a control token in a text is encoded as text, unless `parse_special`."""

    def __init__(self, parts: TokenizerParts) -> None:
        self.eos_ids, self.bos_id = parts.eos_ids, parts.bos_id
        self.strips_leading_space = parts.strips_leading_space
        self._template, self._decode_piece = parts.template, parts.decode_piece
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.fill = fill_tokens(self._backend, parts.fill, parts.fill_ends)  # None: not supported
        added = self._backend.get_added_tokens_decoder()
        self._plain_added = {i: token.content.encode() for i, token in added.items() if not token.special}
        # Control tokens do not stand for text; they are known by their names.
        control = {i: token.content for i, token in added.items() if token.special}
        self.control_tokens: Mapping[str, int] = {name: i for i, name in control.items() if name}
        self._control_ids = frozenset(control)
        largest = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = largest + 1 - parts.padding
        self._pieces: dict[int, bytes] = {}
        self._backend.encode_special_tokens = True  # the backend encodes names of control tokens as text
        self._stand_ins = self._add_stand_ins(added)  # name -> (secret name, id of the secret name)
        self._control_pattern = _any_of(self.control_tokens)
        self._real_ids = {number: self.control_tokens[name] for name, (_, number) in self._stand_ins.items()}

    @property
    def chat_template(self) -> str | None:
        """The template's source; None if the model has no chat format."""
        return self._template.source if self._template else None

    @property
    def takes_tools(self) -> bool:
        return self._template is not None and self._template.takes_tools

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text; `add_special_tokens` adds those with which the model was trained.

        With `parse_special`, names of control tokens become control tokens. Characters without a vocabulary entry are
        dropped (in SmolLM2, some control characters).
        """
        _refuse_surrogates(text)
        marked = self._mark(text) if parse_special else text
        return self._encode_marked(marked, add_special_tokens)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens, using all cores."""
        for text in texts:
            _refuse_surrogates(text)
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation. Names of control tokens in the messages stay text.

        With `continue_final_message` the ids end with the last message's text. `tools` and `variables` are passed to
        the template.

        Before rendering, the first character of every control token's name in the messages is replaced by a private
        character that occurs nowhere else, so that the template sees texts of the same length. All names in the
        rendered text are therefore the template's own and become control tokens. Then the characters are restored.
        """
        template = self._template
        if template is None:
            raise TokenizerError("the model has no chat template; send raw text (--raw, raw=True)")
        given = [messages, tools or [], variables or {}]
        _check_texts(given)
        end_mark, *private = self._private_characters(given, template.source)
        swaps = dict(zip(self._first_characters, private, strict=True))
        safe_messages, safe_tools, safe_variables = self._hide(given, swaps)
        if continue_final_message:
            _mark_end(safe_messages, end_mark)
        rendered = template.render(
            safe_messages,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            tools=safe_tools or None,
            variables=safe_variables,
        )
        if continue_final_message:
            rendered, is_marked, _ = rendered.partition(end_mark)
            if not is_marked:
                raise TokenizerError(
                    "continue_final_message: the model's chat template changes the text of the final message"
                )
        rendered = self._mark(rendered)
        for original, replacement in swaps.items():
            rendered = rendered.replace(replacement, original)
        _refuse_surrogates(rendered)
        return self._encode_marked(rendered, add_special_tokens=False)

    def encode_fill(
        self, prefix: str | Sequence[int], suffix: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids after which the model writes the text between prefix and suffix.

        Names of control tokens stay text. A prefix may also be token ids.
        """
        fill = self.fill
        if fill is None:
            raise RequestError(
                "suffix: this model has no fill-in-the-middle tokens and can only continue a text; leave suffix "
                "out, or use a model that has them, such as Qwen2.5-Coder, StarCoder2 or CodeLlama",
                param="suffix",
            )
        before = self.encode(prefix, add_special_tokens=False) if isinstance(prefix, str) else list(prefix)
        start = self.encode("") if add_special_tokens else []
        return [*start, fill.prefix, *before, fill.suffix, *self._encode_inner(suffix), fill.middle]

    def _encode_inner(self, text: str) -> list[int]:
        """Return the token ids of a text that follows another text, without the leading space that encoding adds."""
        ids = self.encode(text, add_special_tokens=False)
        if not self.strips_leading_space:
            return ids
        before = self.encode("\n", add_special_tokens=False)
        inner = self.encode("\n" + text, add_special_tokens=False)
        return inner[len(before) :] if inner[: len(before)] == before else ids

    def to_json(self) -> str:
        """Return the content of a tokenizer.json for this tokenizer, without the secret names."""
        secret = {number for _, number in self._stand_ins.values()}
        value = json.loads(self._backend.to_str())
        value["added_tokens"] = [token for token in value["added_tokens"] if token["id"] not in secret]
        return json.dumps(value, ensure_ascii=False)

    def has_token(self, token_id: int) -> bool:
        """Return whether the vocabulary has this id; a model's embedding may be padded beyond it."""
        return 0 <= token_id < self.vocab_size and self._backend.id_to_token(token_id) is not None

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; invalid bytes become U+FFFD."""
        joined = b"".join(self.token_bytes(i, skip_special_tokens=skip_special_tokens) for i in ids)
        if self.strips_leading_space:
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes that a token adds to a text: none for a skipped control token or a padding id."""
        if skip_special_tokens and token_id in self._control_ids:
            return b""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def _mark(self, text: str) -> str:
        """Replace names of control tokens by their secret names, which the backend parses."""
        if self._control_pattern is None:
            return text
        return self._control_pattern.sub(lambda match: self._stand_ins[match[0]][0], text)

    def _encode_marked(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [self._real_ids.get(token_id, token_id) for token_id in ids]

    def _piece(self, token_id: int) -> bytes:
        """Return the bytes of a token without the cache; of a control token, its name."""
        if token_id in self._plain_added:
            return self._plain_added[token_id]
        entry = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if entry is None:
            return b""
        return entry.encode("utf-8") if token_id in self._control_ids else self._decode_piece(entry)

    def _add_stand_ins(self, added: Mapping[int, tokenizers.AddedToken]) -> dict[str, tuple[str, int]]:
        """Register a secret name for every control token; return name -> (secret, its id)."""
        nonce = "".join(chr(secrets.choice(_SECRET_CHARACTERS)) for _ in range(12))
        secret_names = {
            name: f"{nonce}{number:06d}{nonce}" for number, name in enumerate(self.control_tokens)
        }
        self._backend.add_tokens(
            [
                tokenizers.AddedToken(
                    secret,
                    single_word=added[self.control_tokens[name]].single_word,
                    lstrip=added[self.control_tokens[name]].lstrip,
                    rstrip=added[self.control_tokens[name]].rstrip,
                    normalized=False,
                    special=False,
                )
                for name, secret in secret_names.items()
            ]
        )
        ids = self._backend.get_vocab(with_added_tokens=True)
        return {name: (secret, ids[secret]) for name, secret in secret_names.items()}

    @property
    def _first_characters(self) -> list[str]:
        return sorted({name[0] for name in self.control_tokens})

    def _private_characters(self, given: object, template: str) -> list[str]:
        """Return private characters that no text contains: an end mark, and one per first character of names."""
        used = set(template).union(*map(set, _texts(given)))
        free = [chr(code) for code in _SWAP_CHARACTERS if chr(code) not in used]
        needed = 1 + len(self._first_characters)
        if len(free) < needed:
            raise TokenizerError("the messages use every private character; remove some of them")
        return free[:needed]

    def _hide(self, value: Any, swaps: Mapping[str, str]) -> Any:  # noqa: ANN401 - any JSON
        """Replace the first characters of control tokens' names in all texts of a value."""
        if isinstance(value, Mapping):
            return {self._hide(key, swaps): self._hide(entry, swaps) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(entry, swaps) for entry in value]
        if self._control_pattern is None or not isinstance(value, str):
            return value
        text = value
        # A replacement can reveal another name, since names can overlap. Therefore repeat until nothing changes.
        while (changed := self._control_pattern.sub(lambda m: swaps[m[0][0]] + m[0][1:], text)) != text:
            text = changed
        return text


def check_vocab(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise `TokenizerError` for end-of-answer ids that are no tokens, or ids beyond the model's embedding."""
    outside = sorted(i for i in tokenizer.eos_ids if not 0 <= i < tokenizer.vocab_size)
    if outside:
        raise TokenizerError(
            f"eos_token_id {outside[0]} is not a token of the tokenizer (0 .. {tokenizer.vocab_size - 1}); "
            "get the model's own files"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model only {config.vocab_size}: "
            "they do not belong together; get the model's own tokenizer"
        )


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of the names, the longest first; None without names."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in a value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _texts(key)
            yield from _texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)


def _check_texts(given: Sequence[Any]) -> None:
    """Raise `TokenizerError` if a message of [messages, tools, variables] has no text, or a text is invalid."""
    for message in given[0]:
        text = message.get("content")
        if not isinstance(text, str) and not (text is None and message.get("tool_calls")):
            raise TokenizerError(f"a message's 'content' is {type(text).__name__}; only text is supported")
    for text in _texts(given):
        _refuse_surrogates(text)


def _mark_end(messages: Sequence[dict[str, Any]], end: str) -> None:
    if not messages or not messages[-1].get("content"):
        raise TokenizerError("continue_final_message needs a final message with text")
    messages[-1]["content"] += end


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text has half of a surrogate pair at character {error.start}; remove it"
        ) from None
