"""Builds tokenizers of the `tokenizers` library from GGUF vocabularies: their pre-tokenizers and merges."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from foreword.errors import TokenizerError

_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_QWEN35 = "qwen35"
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "pixtral", "lfm2")  # Nemotron-H's files say pixtral
_WHOLE_FIRST = (*_LLAMA3, "tekken")
"""Pre-tokenizers of models that use a word's vocabulary entry, if any, without merges, and begin texts with BOS."""

_WORD_START = "\u2581"  # stands for a space in sentencepiece's vocabularies


def _word_pattern(numbers: str, letters: str = r"\p{L}") -> str:
    """Return the split pattern of Llama 3 and Qwen, given the pattern of numbers and the letters of words."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|"
        + numbers
        + rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_THREE_DIGITS = _word_pattern(r"\p{N}{1,3}")  # Llama 3, and tokenizers that derive from tiktoken's cl100k
_ONE_DIGIT = _word_pattern(r"\p{N}")  # Qwen2, Qwen3
_WITH_MARKS = _word_pattern(r"\p{N}", letters=r"\p{L}\p{M}")  # Qwen3.5

_CASELESS = "\\p{Lm}\\p{Lo}\\p{M}"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_CASELESS}]", rf"[\p{{Ll}}{_CASELESS}]"


def _case_pattern(endings: str, numbers: str) -> str:
    """Return the split pattern of Tekken and of tiktoken's o200k, which also split a word before a capital letter.

    `endings` matches contractions at the end of a word, such as 's.
    """
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{endings}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{endings}|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_TEKKEN = _case_pattern("", r"\p{N}")
_O200K = _case_pattern(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")

_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)

_DEEPSEEK_LETTERS = """
41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 3a3-3f5
3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15
1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc
1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d
212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b
a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb
10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943
"""
"""Code points of letters (hexadecimal) that form words in the tokenizers of DeepSeek LLM and V2.

These are most letters that have upper and lower case.
"""


def _deepseek_llm() -> tuple[str, ...]:
    """Return the split patterns of DeepSeek LLM and V2."""
    ranges = [item.split("-") for item in _DEEPSEEK_LETTERS.split()]
    letters = "".join("-".join(f"\\x{{{end}}}" for end in ends) for ends in ranges)
    return (
        r"[\r\n]",
        rf"\s?[{letters}]+",
        r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
        r"\s+$",
        r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
        r"\p{N}",
    )


def _splits() -> dict[str, list[pre_tokenizers.PreTokenizer]]:
    """Return the pre-tokenizers by their names in GGUF metadata."""
    classic = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True), classic]
    three, one = _cut_by(_THREE_DIGITS), _cut_by(_ONE_DIGIT)
    return {
        "gpt-2": [classic],
        "default": [classic],
        "olmo": [classic],
        "smollm": digits,
        "refact": digits,
        **dict.fromkeys((*_LLAMA3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), three),
        **dict.fromkeys(_QWEN2, one),
        _QWEN35: _cut_by(_WITH_MARKS),
        "tekken": _cut_by(_TEKKEN),
        "gpt-4o": _cut_by(_O200K),
        "deepseek-llm": _cut_by(*_deepseek_llm()),
        "deepseek-v3": _cut_by(*_DEEPSEEK_V3),
    }


def _cut_by(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    """Return pre-tokenizers that apply one pattern after the other, then map bytes to characters."""
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    return [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def starts_with_bos(kind: str) -> bool:
    """Return the default for models with this pre-tokenizer: whether texts begin with BOS."""
    return kind in _WHOLE_FIRST


def byte_level_backend(kind: str, tokens: Sequence[str], merges: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer. Raises ValueError if the merges do not fit the tokens."""
    splits = _splits()
    if kind not in splits:
        raise TokenizerError(
            f"pre-tokenizer {kind!r} is not supported; use a model with one of {', '.join(splits)}"
        )
    # Vocabulary entries contain no space (another character stands for it), so a space separates the pair.
    pairs = [_divide(merge) for merge in merges]
    model = _bpe(tokens, pairs, ignore_merges=kind in _WHOLE_FIRST)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits[kind])
    backend.decoder = decoders.ByteLevel()
    if kind in (*_QWEN2, _QWEN35):
        backend.normalizer = normalizers.NFC()
    return backend


def sentencepiece_backend(
    tokens: Sequence[str], scores: Sequence[float | None], unknown: str | None, add_space_prefix: bool
) -> tokenizers.Tokenizer:
    """Return a sentencepiece BPE tokenizer with byte entries; raise ValueError if the vocabulary is inconsistent."""
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
    """Return the two entries that a merge joins."""
    middle = merge.find(" ", 1)
    if middle < 0:
        raise ValueError(f"merge {merge[:40]!r} is not a pair")
    return merge[:middle], merge[middle + 1 :]


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float | None]) -> list[tuple[str, str]]:
    """Return sentencepiece's merges, the best score first: all pairs of entries that together form an entry.

    An entry without a score (a control token, a single byte) is never formed by a merge.
    """
    numbers = {token: number for number, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, tuple[str, str]]] = []  # (-score, left id, right id, pair)
    for token, score in zip(tokens, scores, strict=True):
        if score is None:
            continue
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in numbers and right in numbers:
                merges.append((-score, numbers[left], numbers[right], (left, right)))
    merges.sort()
    return [pair for *_, pair in merges]
