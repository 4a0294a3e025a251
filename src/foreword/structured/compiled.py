"""Defines a grammar compiled for one vocabulary, and the vocabulary as bytes."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_STRING_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING_CHARACTER}{{1,{most}}}" for most in (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 30)),
    f"{_STRING_CHARACTER}+",
]
"""Regular expressions for which llguidance precomputes masks (its slices).

The list is llguidance's own with more lengths of bounded strings. Masks inside such strings take a fifth less time.
"""


@dataclass(frozen=True)
class GrammarTokens:
    """The vocabulary as bytes."""

    pieces: Sequence[bytes]  # [vocabulary], bytes of each token; of a control token, its name
    end_ids: tuple[int, ...]  # tokens that end an answer
    encode: Callable[[str], list[int]]  # tokenizes a text
    control_ids: Sequence[int] = ()  # tokens that do not stand for text
    control_names: frozenset[str] = field(default_factory=frozenset)  # names of the control tokens

    @property
    def size(self) -> int:
        return len(self.pieces)

    def for_llguidance(self) -> "LLTokenizer":
        """Create llguidance's tokenizer; takes about 1 µs per token."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_LlguidanceTokens(self)), n_vocab=self.size, slices=_SLICES)


class _LlguidanceTokens:
    """Adapts a vocabulary to the attributes that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokens: GrammarTokens) -> None:
        self.eos_token_id = tokens.end_ids[0]
        self.tokens = list(tokens.pieces)
        self.special_token_ids = sorted({*tokens.control_ids, *tokens.end_ids})
        self._encode = tokens.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8") if isinstance(text, bytes) else text)


Bits = npt.NDArray[np.int32]
"""Masks of allowed tokens [..., words]: one bit per token of the vocabulary, 32 per word."""

LARGE_BYTES = 4 << 20  # minimum size of a grammar whose memory is returned to the system when it is deleted


class CompiledGrammar:
    """A grammar over one vocabulary, and masks that all its answers share."""

    def __init__(self, matcher: "LLMatcher", tokens: GrammarTokens) -> None:
        self.bytes = 0  # peak memory of its compilation, set after it
        self._matcher = matcher  # initial state, never advanced
        self._lock = Lock()
        self.first_mask: Bits | None = None  # mask of the first token, once computed
        self.is_slow = False  # whether any mask of it was slow
        self.tokens = tokens
        self.end_ids = frozenset(tokens.end_ids)
        self.words = -(-tokens.size // 32)
        # Masks that allow every token, no token, and only end tokens.
        self.everything: Bits = np.full(self.words, -1, np.int32)
        self.nothing: Bits = np.zeros(self.words, np.int32)
        is_end = np.zeros(self.words * 32, np.uint8)
        is_end[list(tokens.end_ids)] = 1
        self.only_ends: Bits = np.packbits(is_end, bitorder="little").view(np.int32)

    def __del__(self) -> None:
        """Return a large grammar's memory to the system, which the C library would keep."""
        if self.bytes >= LARGE_BYTES:
            del self._matcher
            return_free_memory()

    def new_matcher(self) -> "LLMatcher":
        with self._lock:
            return self._matcher.deep_copy()

    def with_all_ends(self, mask: Bits) -> Bits:
        """Allow all end tokens in a mask (in place) if it allows the first, and return the mask.

        llguidance knows only the first end token.
        """
        first = self.tokens.end_ids[0]
        if len(self.end_ids) > 1 and mask[first >> 5] >> (first & 31) & 1:
            mask |= self.only_ends
        return mask

    def allows_one(self, mask: Bits) -> bool:
        """Return whether the mask allows exactly one token, which is not an end token."""
        (words,) = np.nonzero(mask)
        if len(words) != 1:
            return False
        word = int(mask[words[0]]) & 0xFFFFFFFF  # as an unsigned number
        if word.bit_count() != 1:
            return False
        return int(words[0]) * 32 + word.bit_length() - 1 not in self.end_ids

    def only(self, token: int) -> Bits:
        """Return the mask that allows only this token."""
        mask = self.nothing.copy()
        mask.view(np.uint8)[token >> 3] = 1 << (token & 7)
        return mask


def return_free_memory() -> None:
    """Return freed memory to the system (glibc only); takes about 10 ms."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
