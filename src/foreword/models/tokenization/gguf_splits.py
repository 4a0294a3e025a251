"""Splitting and merging as GGUF vocabularies mean it, built with the `tokenizers` library."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from foreword.errors import TokenizerError

_WORD_START = "\u2581"  # sentencepiece writes a space as this


def _word_pattern(numbers: str) -> str:
    """The split of Llama 3 and Qwen2, which differ in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _splits() -> dict[str, list[pre_tokenizers.PreTokenizer]]:
    """Value of tokenizer.ggml.pre -> how a text is cut before merging."""
    classic = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    llama3 = pre_tokenizers.Split(tokenizers.Regex(_word_pattern(r"\p{N}{1,3}")), "isolated")
    qwen2 = pre_tokenizers.Split(tokenizers.Regex(_word_pattern(r"\p{N}")), "isolated")
    return {
        "gpt-2": [classic],
        "default": [classic],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), classic],
        "llama-bpe": [llama3, plain],
        "llama3": [llama3, plain],
        "llama-v3": [llama3, plain],
        "qwen2": [qwen2, plain],
    }


def starts_with_bos(kind: str) -> bool:
    """Whether texts of a byte-level tokenizer start with BOS if the metadata does not say."""
    return _is_llama3(kind)


def _is_llama3(kind: str) -> bool:
    return kind in ("llama-bpe", "llama3", "llama-v3")


def byte_level_backend(kind: str, tokens: Sequence[str], merges: Sequence[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE. Raises ValueError if the merges do not fit the tokens."""
    splits = _splits()
    if kind not in splits:
        raise TokenizerError(
            f"pre-tokenizer {kind!r} is not supported; use a model with one of {', '.join(splits)}"
        )
    # A space inside an entry is written as another character, so the first one after a character divides.
    pairs = [_divide(merge) for merge in merges]
    model = _bpe(tokens, pairs, ignore_merges=_is_llama3(kind))
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits[kind])
    backend.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def sentencepiece_backend(
    tokens: Sequence[str], scores: Sequence[float | None], unknown: str | None, add_space_prefix: bool
) -> tokenizers.Tokenizer:
    """Sentencepiece BPE with single-byte entries. Raises ValueError if the vocabulary is inconsistent."""
    merges = _merges_by_score(tokens, scores)
    model = _bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", _WORD_START)
    prefix = [normalizers.Prepend(_WORD_START)] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, spaces])
    steps = [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space_prefix else steps)
    return backend


def _bpe(tokens: Sequence[str], pairs: list[tuple[str, str]], **settings: object) -> models.BPE:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocabulary, merges=pairs, **settings)
    except Exception as error:  # the library raises plain Exception for everything
        raise ValueError(str(error)) from None


def _divide(merge: str) -> tuple[str, str]:
    middle = merge.find(" ", 1)
    if middle < 0:
        raise ValueError(f"merge {merge[:40]!r} is not a pair")
    return merge[:middle], merge[middle + 1 :]


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float | None]) -> list[tuple[str, str]]:
    """The merges that sentencepiece finds while it looks for the best-scored entry: every way to form one.

    An entry without a score (a control token, a single byte) is never formed from characters.
    """
    numbers = {token: number for number, token in enumerate(tokens)}
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        if score is None:
            continue
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in numbers and right in numbers:
                found.append((-score, numbers[left], numbers[right], (left, right)))
    found.sort()
    return [pair for *_, pair in found]
