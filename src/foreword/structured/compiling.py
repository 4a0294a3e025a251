"""A compiled grammar, and how it is made."""

import re
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from foreword.errors import RequestError
from foreword.structured.alternatives import at_fault
from foreword.structured.grammars import grammar_text
from foreword.structured.limits import parser_limits
from foreword.structured.memory import return_free_memory
from foreword.structured.params import StructuredOutputs
from foreword.structured.state import Bits, GrammarError, GrammarState, unpacked
from foreword.structured.tokens import GrammarTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LARGE_BYTES = 4 << 20
"""Grammars from here on return their memory to the system."""

TRIED_TOKENS = 4
"""Tokens of an answer that are tried when its grammar is compiled."""


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
        self.only_ends: Bits = self._bits_of_ends

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

    @cached_property
    def _bits_of_ends(self) -> Bits:
        bits = np.zeros(self.words * 32, np.uint8)
        bits[list(self.tokens.end_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def compiled(wanted: StructuredOutputs, tokens: GrammarTokens, tokenizer: "LLTokenizer") -> CompiledGrammar:
    """Compile a grammar; raises `RequestError` if it is wrong."""
    from llguidance import LLMatcher

    def matcher_of(one: StructuredOutputs, names: frozenset[str] = frozenset()) -> LLMatcher:
        return LLMatcher(tokenizer, grammar_text(one, names), log_level=0, limits=parser_limits())

    matcher = matcher_of(wanted, tokens.control_names)
    if matcher.is_error():
        where = at_fault(wanted, lambda one: bool(matcher_of(one).is_error()))
        why = in_one_line(matcher.get_error())
        raise RequestError(f"structured outputs: {wanted.form}: {where}{why}")
    return CompiledGrammar(matcher, tokens)


def try_first_tokens(grammar: CompiledGrammar, form: str) -> None:
    """Write the beginning of an answer: a grammar that is too complex shows there, or ends its own answer later."""
    state = GrammarState(grammar)
    for place in range(TRIED_TOKENS):
        masks = state.masks((), ())
        possible = np.flatnonzero(unpacked(masks, grammar.tokens.size)[0])
        if state.error is not None or not len(possible):
            raise RequestError(f"structured outputs: {form}: {in_one_line(state.error or 'nothing fits it')}")
        if place == 0:
            grammar.first_mask = masks[0]
        if set(possible.tolist()) <= grammar.ends:
            return
        text = [token for token in state.forced(1) or possible.tolist() if token not in grammar.ends][:1]
        try:
            state.commit(text)
        except GrammarError as error:
            raise RequestError(f"structured outputs: {form}: {in_one_line(str(error))}") from None


_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")


def in_one_line(error: str) -> str:
    """What is wrong with a grammar, in the parser's words where they are plain."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["it cannot be compiled"]
    named = _UNSUPPORTED.search(lines[0])
    if named:
        return f"the schema uses {named[1]}, which is not supported"
    if lines[0].startswith("oneOf constraints"):
        return 'the schema uses "oneOf" with cases that overlap, which is not supported; use "anyOf"'
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join((reasons or lines)[0].split())[:300]
