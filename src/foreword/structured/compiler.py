"""Compiles and caches the grammars of an engine.

A grammar is checked, compiled on trial in another process, and then compiled in this one.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock
from time import monotonic, thread_time
from typing import TYPE_CHECKING

from foreword.errors import RequestError, refusing
from foreword.structured.compiled import CompiledGrammar, GrammarTokens, return_free_memory
from foreword.structured.compiling import compiled, try_first_tokens
from foreword.structured.limits import CompileLimits, MaskLimits, check_counts
from foreword.structured.masks import MaskBudget, MaskWorker, TenantBudgets, in_yielding_thread
from foreword.structured.params import FORMAT_PARAM, StructuredOutputs, refusal
from foreword.structured.state import GrammarState
from foreword.structured.trials import CompileTrials

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CACHED = 128  # maximum number of cached grammars; the least recently used one is dropped
MAX_CACHED_BYTES = 16 << 20  # maximum total memory of cached grammars

MAX_GRAMMAR_BYTES = MAX_CACHED_BYTES // 8
"""Maximum memory of one cached grammar; larger ones live only as long as their requests."""


class CompileSlots:
    """Limits concurrent compilations, in total and per tenant."""

    def __init__(self, limits: CompileLimits) -> None:
        self._limits = limits
        self._changed = Condition()
        self._compiling: list[str] = []  # tenants of running compilations

    @contextmanager
    def reserved(self, tenant: str) -> Iterator[None]:
        """Wait for permission to compile and hold it; raise `RequestError` on timeout."""
        limits = self._limits
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._may_compile(tenant), limits.patience * limits.cpu_seconds
            ):
                raise refusal("other grammars are still being compiled; try again")
            self._compiling.append(tenant)
        try:
            yield
        finally:
            with self._changed:
                self._compiling.remove(tenant)
                self._changed.notify_all()

    def _may_compile(self, tenant: str) -> bool:
        of_tenant, limits = self._compiling.count(tenant), self._limits
        return len(self._compiling) < limits.at_once and of_tenant < limits.at_once_per_tenant


class Grammars:
    """Compiles grammars, and caches them by response format; thread-safe."""

    def __init__(
        self,
        tokens: Callable[[], GrammarTokens],
        limits: CompileLimits | None = None,
        masks: MaskLimits | None = None,
        clock: Callable[[], float] = thread_time,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """`tokens` is called for the first grammar; `clock` measures CPU time of masks, `now` the time between them."""
        self.clock = clock
        self._make_tokens = tokens
        self._limits = limits or CompileLimits()
        self._tenants = TenantBudgets(masks, now)
        self._cached: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._lock = Lock()
        self._set_up_lock = Lock()
        self._ready: tuple[GrammarTokens, LLTokenizer, CompileTrials] | None = None
        self._slots = CompileSlots(self._limits)
        self._worker = MaskWorker()

    def is_ready(self, wanted: StructuredOutputs | None) -> bool:
        """Return whether `begin` would return without compiling; true without a response format."""
        with self._lock:
            return wanted is None or wanted in self._cached

    def begin(self, wanted: StructuredOutputs, tenant: str = "") -> GrammarState:
        """Return the state of a new answer; raise `RequestError` for an invalid or too large grammar."""
        return self.begin_all(wanted, 1, tenant)[0]

    @refusing(FORMAT_PARAM)
    def begin_all(self, wanted: StructuredOutputs, count: int, tenant: str = "") -> list[GrammarState]:
        """Return states for several answers to one request, compiling the grammar once."""
        with self._lock:
            grammar = self._cached.get(wanted)
            if grammar is not None:
                self._cached.move_to_end(wanted)
        if grammar is None:
            check_counts(wanted)
            with self._slots.reserved(tenant):
                grammar = self._compiled(wanted)
            self._keep(wanted, grammar)
        return [
            GrammarState(grammar, MaskBudget(self._tenants, tenant, self.clock), self._worker)
            for _ in range(count)
        ]

    def wait_for_masks(self, seconds: float) -> None:
        """Wait at most `seconds` until a slow mask is computed."""
        self._worker.wait(seconds)

    def close(self) -> None:
        self._worker.close()
        with self._set_up_lock:
            if self._ready is not None:
                self._ready[2].close()

    def _compiled(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Compile a grammar on trial, then in this process: a compiled grammar cannot be sent between processes."""
        tokens, tokenizer, trials = self._tokenizer()
        size = trials.run(wanted)

        def compile_it() -> CompiledGrammar:
            try:
                grammar = compiled(wanted, tokens, tokenizer)
                try_first_tokens(grammar, wanted.form)
                return grammar
            finally:
                return_free_memory()  # memory of compilation and of dropped grammars

        grammar = in_yielding_thread(compile_it)
        grammar.bytes = size
        return grammar

    def _keep(self, wanted: StructuredOutputs, grammar: CompiledGrammar) -> None:
        """Cache a grammar unless it is too large, and drop the least recently used ones."""
        dropped: list[CompiledGrammar] = []  # freed outside the lock
        with self._lock:
            if grammar.bytes <= MAX_GRAMMAR_BYTES:
                self._cached[wanted] = grammar
            while (
                len(self._cached) > MAX_CACHED
                or sum(cached.bytes for cached in self._cached.values()) > MAX_CACHED_BYTES
            ):
                dropped.append(self._cached.popitem(last=False)[1])

    def _tokenizer(self) -> "tuple[GrammarTokens, LLTokenizer, CompileTrials]":
        """Return the vocabulary, its tokenizer and its trials, created by the first call."""
        with self._set_up_lock:
            if self._ready is None:
                tokens = self._make_tokens()
                if not tokens.end_ids:
                    raise RequestError(
                        "structured outputs need a model with an end-of-sequence token; this one has none"
                    )
                self._ready = tokens, tokens.for_llguidance(), CompileTrials(tokens, self._limits)
            return self._ready
