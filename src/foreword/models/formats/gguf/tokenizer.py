"""Creates a tokenizer from GGUF metadata."""

from functools import partial
from itertools import takewhile
from typing import Any

import tokenizers
from tokenizers import processors

from foreword.errors import TokenizerError
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.gguf.file import GgufFile
from foreword.models.tokenization.chat_template import ChatTemplate
from foreword.models.tokenization.gguf_splits import (
    byte_level_backend,
    sentencepiece_backend,
    starts_with_bos,
)
from foreword.models.tokenization.token_pieces import PieceDecoder, byte_level_decoder, sentencepiece_decoder
from foreword.models.tokenization.tokenizer import Tokenizer, TokenizerParts

TOKENIZER_PREFIX = "tokenizer.ggml."  # prefix of the metadata keys that describe the tokenizer

_NORMAL_TYPE, _UNKNOWN_TYPE, _CONTROL_TYPE, _USER_DEFINED_TYPE, _UNUSED_TYPE = 1, 2, 3, 4, 5
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_FILL_KEYS = (
    ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
    ("prefix_token_id", "suffix_token_id", "middle_token_id"),  # older files
)
_FILL_END_KEYS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "eot_token_id")

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end an answer if the chat template uses them, in addition to those in the metadata."""

_HARMONY_ENDS = ("<|return|>", "<|call|>")
"""Tokens that end an answer of gpt-oss. Its `<|end|>` only ends a message, and an answer may have several messages."""

_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end every answer, as in llama.cpp: files of chat models often name only the end of a turn."""


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the tokenizer of a GGUF file."""
    fields = ConfigFields(file.metadata, str(file.path), prefix=TOKENIZER_PREFIX)
    tokens = _string_list(fields, "tokens")
    if len(set(tokens)) != len(tokens):
        raise _bad_vocabulary(fields, "its tokens are not distinct")
    backend, decode_piece, strips_leading_space, add_bos = _build(fields, tokens)
    special = _add_tokens(backend, fields, tokens)
    bos_id = _token_id(fields, "bos_token_id", tokens)
    if bos_id is not None and fields.flag("add_bos_token", add_bos):
        # Named "BOS" here, because the library's template syntax cannot express the name of every token.
        bos = {"id": "BOS", "ids": [bos_id], "tokens": [tokens[bos_id]]}
        backend.post_processor = processors.TemplateProcessing(single=["BOS", "$A"], special_tokens=[bos])
    source = file.metadata.get("tokenizer.chat_template")
    template = _chat_template(fields, source, tokens) if isinstance(source, str) else None
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            decode_piece=decode_piece,
            strips_leading_space=strips_leading_space,
            eos_ids=_eos_ids(fields, tokens, special, source if isinstance(source, str) else ""),
            bos_id=bos_id,
            template=template,
            padding=_count_padding(_types(fields, len(tokens))),
            fill=_fill(fields, tokens),
            fill_ends=tuple(
                end for key in _FILL_END_KEYS if (end := _token_id(fields, key, tokens)) is not None
            ),
        )
    )


def _build(fields: ConfigFields, tokens: list[str]) -> tuple[tokenizers.Tokenizer, PieceDecoder, bool, bool]:
    """Return (backend without added tokens, decoder of its pieces, strips_leading_space, starts_with_bos).

    `starts_with_bos` is whether texts start with BOS if the metadata does not say.
    """
    model = fields.text("model")
    try:
        if model == "gpt2":
            pre_tokenizer = fields.text("pre")
            backend = byte_level_backend(pre_tokenizer, tokens, _string_list(fields, "merges"))
            return backend, byte_level_decoder(), False, starts_with_bos(pre_tokenizer)
        if model == "llama":
            adds_space = fields.flag("add_space_prefix", True)
            scores = _scores(fields, _types(fields, len(tokens)))
            unknown = _token_id(fields, "unknown_token_id", tokens)
            name = None if unknown is None else tokens[unknown]
            backend = sentencepiece_backend(tokens, scores, name, adds_space)
            return backend, sentencepiece_decoder, adds_space, True
    except (ValueError, OverflowError) as error:
        raise _bad_vocabulary(fields, " ".join(str(error).split())) from None
    raise TokenizerError(f"{fields.origin}: tokenizer model {model!r} is not supported; use gpt2 or llama")


def _add_tokens(backend: tokenizers.Tokenizer, fields: ConfigFields, tokens: list[str]) -> list[str]:
    """Register control and user-defined tokens with the backend; return the control tokens."""
    types = _types(fields, len(tokens))
    typed = [(token, kind) for token, kind in zip(tokens, types, strict=True) if token]
    control = [token for token, kind in typed if kind in (_CONTROL_TYPE, _UNKNOWN_TYPE)]
    plain = [token for token, kind in typed if kind == _USER_DEFINED_TYPE]
    added = partial(tokenizers.AddedToken, normalized=False)
    backend.add_special_tokens([added(token, special=True) for token in control])
    backend.add_tokens([added(token, special=False) for token in plain])
    return control


def _chat_template(fields: ConfigFields, source: str, tokens: list[str]) -> ChatTemplate:
    keys = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    ids = {name: _token_id(fields, key, tokens) for name, key in keys.items()}
    return ChatTemplate(source, {name: tokens[i] for name, i in ids.items() if i is not None})


def _eos_ids(fields: ConfigFields, tokens: list[str], special: list[str], template: str) -> frozenset[int]:
    """Return the ids of the tokens that end an answer, from the metadata, the chat template and well-known names."""
    stated = {_token_id(fields, key, tokens) for key in _END_KEYS}
    names = _HARMONY_ENDS if set(_HARMONY_ENDS) <= set(special) else _TURN_ENDS
    ends = [name for name in names if name in template] + list(_TEXT_ENDS)
    named = {tokens.index(name) for name in ends if name in special}
    return frozenset(i for i in stated | named if i is not None)


def _fill(fields: ConfigFields, tokens: list[str]) -> tuple[int, int, int] | None:
    """Return the fill-in-the-middle tokens (prefix, suffix, middle) that the metadata declares."""
    for keys in _FILL_KEYS:
        prefix, suffix, middle = (_token_id(fields, key, tokens) for key in keys)
        if prefix is not None and suffix is not None and middle is not None:
            return prefix, suffix, middle
    return None


def _token_id(fields: ConfigFields, key: str, tokens: list[str]) -> int | None:
    """Return the token id under a key of the metadata; None if the key is missing."""
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
        raise fields.malformed(key, "the id of a token")
    return value


def _types(fields: ConfigFields, count: int) -> list[int]:
    types = fields.get("token_type")
    if not isinstance(types, list) or len(types) != count:
        raise _bad_vocabulary(fields, "token_type does not have an entry for every token")
    return types


def _count_padding(types: list[int]) -> int:
    """Return how many padding entries converters have added at the end, to match the rows of the embedding."""
    return sum(1 for _ in takewhile(lambda kind: kind == _UNUSED_TYPE, reversed(types)))


def _scores(fields: ConfigFields, types: list[int]) -> list[float | None]:
    """Return the score of each entry that merges can form; None for other entries."""
    scores = fields.get("scores")
    if not isinstance(scores, list) or len(scores) != len(types):
        raise _bad_vocabulary(fields, "scores does not have a number for every token")
    if not all(isinstance(score, float) for score in scores):
        raise fields.malformed("scores", "a list of numbers")
    return [score if kind == _NORMAL_TYPE else None for score, kind in zip(scores, types, strict=True)]


def _string_list(fields: ConfigFields, key: str) -> list[str]:
    value: Any = fields.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(entry, str) for entry in value):
        raise fields.malformed(key, "a list of strings")
    return value


def _bad_vocabulary(fields: ConfigFields, reason: str) -> TokenizerError:
    return TokenizerError(f"{fields.origin}: the vocabulary is damaged ({reason}); get the file again")
