"""Text to token ids and back, with control tokens that text cannot forge."""

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

# Two areas of private characters: what is swapped back in a rendering must not occur in the secret names.
_SWAP_CHARACTERS = range(0xE000, 0xF900)
_SECRET_CHARACTERS = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True)
class TokenizerParts:
    """What a file format supplies; the rest of a tokenizer is the same for all formats."""

    backend: tokenizers.Tokenizer  # splits and merges; its added tokens marked special are control tokens
    decode_piece: PieceDecoder  # vocabulary entry -> bytes
    strips_leading_space: bool  # one space at the start of a decoded text is an artefact
    eos_ids: frozenset[int]  # any of these ends an answer
    bos_id: int | None  # starts a text, where the model has such a token
    template: ChatTemplate | None  # None: the model has no chat format
    padding: int = 0  # entries at the end that only fill the vocabulary up
    fill: tuple[int, int, int] | None = None  # fill-in-the-middle tokens, where the file states them
    fill_ends: tuple[int, ...] = ()  # tokens that end a filled gap, likewise


class Tokenizer:
    """A model's tokenizer. Control tokens' names in a text stay text, whatever it says, unless that is asked for."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.fill = fill_tokens(self._backend, parts.fill, parts.fill_ends)  # None: the model has none
        added = self._backend.get_added_tokens_decoder()
        self._plain_added = {i: token.content.encode() for i, token in added.items() if not token.special}
        self._control = {token.content: i for i, token in added.items() if token.special and token.content}
        self._control_ids = frozenset(i for i, token in added.items() if token.special)
        largest = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = largest + 1 - parts.padding
        self._pieces: dict[int, bytes] = {}
        self._backend.encode_special_tokens = True  # control tokens' names in a text are text
        self._stand_ins = self._add_stand_ins(added)
        self._control_pattern = _any_of(self._control)
        self._real_ids = {number: self._control[name] for name, (_, number) in self._stand_ins.items()}

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._parts.eos_ids

    @property
    def bos_id(self) -> int | None:
        """The token that starts a text, if the model has one."""
        return self._parts.bos_id

    @property
    def chat_template(self) -> str | None:
        """The template's source; None if the model has no chat format."""
        return self._parts.template.source if self._parts.template else None

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools."""
        return self._parts.template is not None and self._parts.template.takes_tools

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Tokens that no text spells, by their names."""
        return self._control

    @property
    def strips_leading_space(self) -> bool:
        """Whether a decoded text loses one space at its start."""
        return self._parts.strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text; `add_special_tokens` puts those around it that the model was trained with.

        With `parse_special`, names of control tokens in the text become those tokens. What the vocabulary has no
        entry for (some control characters in SmolLM2's) is dropped.
        """
        _refuse_surrogates(text)
        marked = self._mark(text) if parse_special else text
        return self._encode_marked(marked, add_special_tokens)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each of some texts, without special tokens, on all cores."""
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
        """Token ids of a conversation. Only the template's own control tokens become control tokens.

        With `continue_final_message` they end where the last message's text does. `tools` and `variables` are for
        templates that ask for them.

        Before rendering, the first character of every control token's name inside the messages is
        swapped for a private one that occurs nowhere else, so that the template sees contents of the
        same length and shape. The names that are left in the rendering are the template's.
        """
        template = self._parts.template
        if template is None:
            raise TokenizerError("the model has no chat template; send raw text (--raw, raw=True)")
        given = [messages, tools or [], variables or {}]
        _check_texts(given)
        end, *others = self._private_characters(given, template.source)
        swaps = dict(zip(self._first_characters, others, strict=True))
        hidden, shown_tools, shown_variables = self._hide(given, swaps)
        if continue_final_message:
            _mark_end(hidden, end)
        rendered = template.render(
            hidden,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            tools=shown_tools or None,
            variables=shown_variables,
        )
        if continue_final_message:
            rendered, found, _ = rendered.partition(end)
            if not found:
                raise TokenizerError("the model's chat template does not show the final message as it is")
        rendered = self._mark(rendered)
        for original, private in swaps.items():
            rendered = rendered.replace(private, original)
        _refuse_surrogates(rendered)
        return self._encode_marked(rendered, add_special_tokens=False)

    def encode_fill(
        self, prefix: str | Sequence[int], suffix: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids after which the model writes what stands between two texts.

        Names of control tokens in the texts stay text. Token ids of a prefix are taken as they are.
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
        """Token ids of a text inside another, without the space that the vocabulary puts at a text's start."""
        ids = self.encode(text, add_special_tokens=False)
        if not self.strips_leading_space:
            return ids
        before = self.encode("\n", add_special_tokens=False)
        inner = self.encode("\n" + text, add_special_tokens=False)
        return inner[len(before) :] if inner[: len(before)] == before else ids

    def to_json(self) -> str:
        """tokenizer.json of this tokenizer, wherever it came from; without the secret names."""
        secret = {number for _, number in self._stand_ins.values()}
        value = json.loads(self._backend.to_str())
        value["added_tokens"] = [token for token in value["added_tokens"] if token["id"] not in secret]
        return json.dumps(value, ensure_ascii=False)

    def has_token(self, token_id: int) -> bool:
        """Whether the vocabulary has an entry with this id; a model's table may be padded beyond it."""
        return 0 <= token_id < self.vocab_size and self._backend.id_to_token(token_id) is not None

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that form no character become U+FFFD."""
        joined = b"".join(self.token_bytes(i, skip_special_tokens=skip_special_tokens) for i in ids)
        if self.strips_leading_space and joined.startswith(b" "):
            joined = joined[1:]
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that a token adds to the output: none for a skipped control token or a padding id."""
        if skip_special_tokens and token_id in self._control_ids:
            return b""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def _mark(self, text: str) -> str:
        """The text with control tokens' names replaced by the secret ones, which the backend reads as tokens."""
        if self._control_pattern is None:
            return text
        return self._control_pattern.sub(lambda match: self._stand_ins[match[0]][0], text)

    def _encode_marked(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [self._real_ids.get(token_id, token_id) for token_id in ids]

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._plain_added:
            return self._plain_added[token_id]
        entry = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if entry is None:
            return b""
        return entry.encode("utf-8") if token_id in self._control_ids else self._parts.decode_piece(entry)

    def _add_stand_ins(self, added: Mapping[int, tokenizers.AddedToken]) -> dict[str, tuple[str, int]]:
        """For every control token a secret name that the backend does read: name -> (secret, its id)."""
        nonce = "".join(chr(secrets.choice(_SECRET_CHARACTERS)) for _ in range(12))
        secret_names = {name: f"{nonce}{number:06d}{nonce}" for number, name in enumerate(self._control)}
        self._backend.add_tokens(
            [
                tokenizers.AddedToken(
                    secret,
                    single_word=added[self._control[name]].single_word,
                    lstrip=added[self._control[name]].lstrip,
                    rstrip=added[self._control[name]].rstrip,
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
        """Of the names of control tokens."""
        return sorted({name[0] for name in self._control})

    def _private_characters(self, given: object, template: str) -> list[str]:
        """One more than names of control tokens have first characters, none of which any text here contains."""
        taken = set(template).union(*map(set, _texts(given)))
        free = [chr(code) for code in _SWAP_CHARACTERS if chr(code) not in taken]
        needed = 1 + len(self._first_characters)
        if len(free) < needed:
            raise TokenizerError("the messages use every private character; remove some of them")
        return free[:needed]

    def _hide(self, value: Any, swaps: Mapping[str, str]) -> Any:  # noqa: ANN401 - any JSON
        """The same with control tokens' names in its texts made unreadable."""
        if isinstance(value, Mapping):
            return {self._hide(key, swaps): self._hide(entry, swaps) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(entry, swaps) for entry in value]
        if self._control_pattern is None or not isinstance(value, str):
            return value
        text = value
        # Names can overlap, so what is left after one pass is looked at again.
        while (changed := self._control_pattern.sub(lambda m: swaps[m[0][0]] + m[0][1:], text)) != text:
            text = changed
        return text


def check_vocab(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Refuse a tokenizer that can produce ids for which the model has no embedding, or ends at no token."""
    outside = sorted(i for i in tokenizer.eos_ids if not 0 <= i < tokenizer.vocab_size)
    if outside:
        raise TokenizerError(
            f"eos_token_id {outside[0]} is no token of the tokenizer (0 .. {tokenizer.vocab_size - 1}); "
            "get the model's own files"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model only {config.vocab_size}; "
            "they do not belong together, get the model's own tokenizer"
        )


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _texts(value: object) -> Iterator[str]:
    """All texts in a value, keys included."""
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
            f"the text has half a surrogate pair at character {error.start}, which is no text; remove it"
        ) from None
