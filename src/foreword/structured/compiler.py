"""Compiles grammars once, in threads of their own, within limits."""

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from threading import BoundedSemaphore, Lock, Thread, get_ident
from time import clock_gettime, monotonic, pthread_getcpuclockid
from typing import TYPE_CHECKING

import numpy as np

from foreword.errors import RequestError
from foreword.structured.alternatives import at_fault
from foreword.structured.grammars import grammar_text
from foreword.structured.params import StructuredOutputs
from foreword.structured.state import Bits, GrammarError, GrammarState, unpacked
from foreword.structured.tokens import GrammarTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

KEPT = 128
"""Compiled grammars that are kept at hand; the one that was asked for longest ago goes for another."""

COMPILE_SECONDS = 5.0
"""Of a processor's time: a grammar that takes longer to compile is refused."""

PATIENCE = 12
"""Times as long is waited for on a machine that has other things to do."""

TRIED_TOKENS = 4
"""Of an answer, that are tried when its grammar is compiled."""

AT_ONCE = 2
"""Grammars that are compiled at the same time; others wait for their turn."""


class CompiledGrammar:
    """A grammar over one vocabulary, and masks that many states share."""

    def __init__(self, matcher: "LLMatcher", tokens: GrammarTokens) -> None:
        self._matcher = matcher  # at the beginning; never moved
        self._lock = Lock()
        self.tokens = tokens
        self.ends = frozenset(tokens.end_ids)
        self.words = -(-tokens.size // 32)
        self.everything: Bits = np.full(self.words, -1, np.int32)
        self.nothing: Bits = np.zeros(self.words, np.int32)
        self.only_ends: Bits = self._bits_of_ends

    def new_matcher(self) -> "LLMatcher":
        """A parser at the beginning."""
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
        """The mask that allows one token."""
        mask = self.nothing.copy()
        mask.view(np.uint8)[token >> 3] = 1 << (token & 7)
        return mask

    @cached_property
    def _bits_of_ends(self) -> Bits:
        bits = np.zeros(self.words * 32, np.uint8)
        bits[list(self.tokens.end_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


class Grammars:
    """The grammars of an engine, by what was asked for. Any thread may ask."""

    def __init__(self, tokens: Callable[[], GrammarTokens], seconds: float = COMPILE_SECONDS) -> None:
        """`tokens` is called when the first grammar is compiled."""
        self._make_tokens = tokens
        self._seconds = seconds
        self._kept: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._lock = Lock()
        self._setting_up = Lock()
        self._ready: tuple[GrammarTokens, LLTokenizer] | None = None
        self._turns = BoundedSemaphore(AT_ONCE)

    def is_ready(self, wanted: StructuredOutputs | None) -> bool:
        """Whether `begin` would answer at once."""
        with self._lock:
            return wanted is None or wanted in self._kept

    def begin(self, wanted: StructuredOutputs) -> GrammarState:
        """A new answer of this form; raises `RequestError` for a form that cannot be had."""
        with self._lock:
            grammar = self._kept.get(wanted)
            if grammar is not None:
                self._kept.move_to_end(wanted)
        if grammar is None:
            grammar = self._compiled_in_time(wanted)
            with self._lock:
                self._kept[wanted] = grammar
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return GrammarState(grammar)

    def _compiled_in_time(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """In a thread that is left behind if it takes too long; the parser's own limits end it some time."""
        self._tokenizer()
        if not self._turns.acquire(timeout=PATIENCE * self._seconds):
            raise RequestError("structured outputs: other grammars are still being compiled; try again")
        found: list[CompiledGrammar | Exception] = []
        clocks: list[
            int
        ] = []  # the thread's own: to ask for that of a thread that may have ended is not safe

        def work() -> None:
            clocks.append(pthread_getcpuclockid(get_ident()))
            try:
                found.append(self._compiled(wanted))
            except Exception as error:  # told to whoever asked
                found.append(error)
            finally:
                self._turns.release()

        worker = Thread(target=work, name="foreword-grammar", daemon=True)
        worker.start()
        _wait(worker, clocks, self._seconds)
        if not found:
            raise RequestError(
                f"structured outputs: {wanted.form} takes longer than {self._seconds:g} s to compile; make it smaller"
            )
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _compiled(self, wanted: StructuredOutputs) -> CompiledGrammar:
        from llguidance import LLMatcher

        tokens, tokenizer = self._tokenizer()
        matcher = LLMatcher(
            tokenizer, grammar_text(wanted, tokens.control_names), log_level=0, limits=parser_limits()
        )
        if matcher.is_error():

            def fails(one: StructuredOutputs) -> bool:
                return bool(
                    LLMatcher(tokenizer, grammar_text(one), log_level=0, limits=parser_limits()).is_error()
                )

            whose, why = at_fault(wanted, fails), in_one_line(matcher.get_error())
            raise RequestError(f"structured outputs: {wanted.form}: {whose}{why}")
        grammar = CompiledGrammar(matcher, tokens)
        _try(grammar, wanted.form)
        return grammar

    def _tokenizer(self) -> "tuple[GrammarTokens, LLTokenizer]":
        with self._setting_up:
            if self._ready is None:
                tokens = self._make_tokens()
                if not tokens.end_ids:
                    raise RequestError(
                        "structured outputs need a model with an end-of-sequence token; this one has none"
                    )
                self._ready = tokens, tokens.for_llguidance()
            return self._ready


def _wait(worker: Thread, clocks: list[int], seconds: float) -> None:
    """Until a thread has ended, or has used so many seconds of a processor."""
    given_up = monotonic() + PATIENCE * seconds
    while worker.is_alive() and monotonic() < given_up:
        worker.join(seconds / 100)
        try:
            if clocks and clock_gettime(clocks[0]) > seconds:
                return
        except OSError:  # it has ended
            return


def _try(grammar: CompiledGrammar, form: str) -> None:
    """Write the beginning of an answer: what is too complex shows there, or makes a request fail alone later."""
    state = GrammarState(grammar)
    for _ in range(TRIED_TOKENS):
        mask = unpacked(state.masks((), ()), grammar.tokens.size)[0]
        possible = np.flatnonzero(mask)
        if state.error is not None or not len(possible):
            raise RequestError(f"structured outputs: {form}: {in_one_line(state.error or 'nothing fits it')}")
        if set(possible.tolist()) <= grammar.ends:
            return
        text = [token for token in state.forced(1) or possible.tolist() if token not in grammar.ends][:1]
        try:
            state.commit(text)
        except GrammarError as error:
            raise RequestError(f"structured outputs: {form}: {in_one_line(str(error))}") from None


def parser_limits() -> "LLParserLimits":
    """What a grammar may cost, when it is compiled and at every token."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=8_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


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
