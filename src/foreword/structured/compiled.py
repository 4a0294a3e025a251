"""A grammar compiled for one vocabulary, and the vocabulary as bytes."""

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

_IN_A_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_A_TEXT}{{1,{most}}}" for most in (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 30)),
    f"{_IN_A_TEXT}+",
]
"""Tokens whose masks llguidance works out once and for all: its list, with more steps for texts of a bounded length.
Masks inside those then take a fifth less time."""


@dataclass(frozen=True)
class GrammarTokens:
    """The vocabulary as bytes. A grammar sees exactly what an answer's text is made of."""

    pieces: Sequence[bytes]  # [vocabulary], what each id adds to the text; of control tokens their names
    end_ids: tuple[int, ...]  # any of them ends an answer
    encode: Callable[[str], list[int]]  # a text as the model's own tokenizer splits it
    control_ids: Sequence[int] = ()  # tokens that no text spells
    control_names: frozenset[str] = field(default_factory=frozenset)

    @property
    def size(self) -> int:
        return len(self.pieces)

    def for_llguidance(self) -> "LLTokenizer":
        """As llguidance wants it; takes about a microsecond for every token."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Wrapped(self)), n_vocab=self.size, slices=_SLICES)


class _Wrapped:
    """The names that llguidance looks for."""

    bos_token_id = None

    def __init__(self, tokens: GrammarTokens) -> None:
        self.eos_token_id = tokens.end_ids[0]
        self.tokens = list(tokens.pieces)
        self.special_token_ids = sorted({*tokens.control_ids, *tokens.end_ids})
        self._encode = tokens.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8") if isinstance(text, bytes) else text)


Bits = npt.NDArray[np.int32]
"""[..., words], a bit for every token of the vocabulary, 32 in a word."""

LARGE_BYTES = 4 << 20
"""Grammars from here on return their memory to the system."""


class CompiledGrammar:
    """A grammar over one vocabulary, and masks that many states share."""

    def __init__(self, matcher: "LLMatcher", tokens: GrammarTokens) -> None:
        self.bytes = 0  # memory that it takes, compiling included
        self._matcher = matcher  # at the beginning; never moved
        self._lock = Lock()
        self.first_mask: Bits | None = None  # what an answer may begin with, once that is known
        self.is_slow = False  # whether a mask was slow
        self.tokens = tokens
        self.ends = frozenset(tokens.end_ids)
        self.words = -(-tokens.size // 32)
        self.everything: Bits = np.full(self.words, -1, np.int32)
        self.nothing: Bits = np.zeros(self.words, np.int32)
        ends = np.zeros(self.words * 32, np.uint8)
        ends[list(tokens.end_ids)] = 1
        self.only_ends: Bits = np.packbits(ends, bitorder="little").view(np.int32)

    def __del__(self) -> None:
        """Return the memory of a large grammar to the system: the C library would keep it."""
        if self.bytes >= LARGE_BYTES:
            del self._matcher
            return_free_memory()

    def new_matcher(self) -> "LLMatcher":
        """Return a parser at the beginning."""
        with self._lock:
            return self._matcher.deep_copy()

    def with_all_ends(self, mask: Bits) -> Bits:
        """llguidance knows one end token; where it may come, so may the model's others."""
        first = self.tokens.end_ids[0]
        if len(self.ends) > 1 and mask[first >> 5] >> (first & 31) & 1:
            mask |= self.only_ends
        return mask

    def allows_one(self, mask: Bits) -> bool:
        """Whether one token is all that a mask allows, and it does not end the answer."""
        (words,) = np.nonzero(mask)
        if len(words) != 1:
            return False
        word = int(mask[words[0]]) & 0xFFFFFFFF
        return word & (word - 1) == 0 and int(words[0]) * 32 + word.bit_length() - 1 not in self.ends

    def only(self, token: int) -> Bits:
        """Return the mask that allows one token."""
        mask = self.nothing.copy()
        mask.view(np.uint8)[token >> 3] = 1 << (token & 7)
        return mask


def return_free_memory() -> None:
    """Return what the C library keeps of freed memory; takes some 10 ms. Only glibc keeps that much."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
