"""Requests in, committed tokens out."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules import Rule
from foreword.control.fixed import FixedPolicy
from foreword.engine.request import Request, RequestLimits
from foreword.engine.scheduler import Scheduler, SchedulerSizes
from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.models.interface import Decoder
from foreword.speculation.protocols import Policy, Scheduled, added_memory
from foreword.speculation.step import Stepper, StepResult


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine."""

    kv_cache_memory_bytes: int = 1 << 30  # upper bound of KV memory; pages are touched only when used
    max_model_len: int | None = None  # cap on prompt + answer; None: what the model and the cache allow
    max_num_batched_tokens: int = 512  # rows of one target pass
    max_num_seqs: int = 64  # requests that run at once
    acceptance_rule: str = "coupled"  # how drafts are judged: coupled, token or block


@dataclass
class StepSeconds:
    """Where the time of an engine's steps went, added up."""

    steps: int = 0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    total: float = 0.0  # all of the step; what the other three leave is scheduling and bookkeeping

    def add(self, result: StepResult, total: float) -> None:
        """Count one step."""
        self.steps += 1
        self.draft += result.draft_seconds
        self.verify += result.verify_seconds
        self.accept += result.accept_seconds
        self.total += total


class Engine:
    """Owns target, KV and scheduler; every `step` is one target pass for all requests that take part."""

    def __init__(
        self,
        target: Decoder,
        eos_ids: frozenset[int],
        config: EngineConfig | None = None,
        policy: Policy | None = None,
    ) -> None:
        config = config or EngineConfig()
        self._policy = policy or FixedPolicy()
        num_pages = _num_pages(target, config)
        target.allocate_kv(num_pages, PAGE_SIZE)
        self.cache = PagedCache(num_pages)
        self.max_model_len = _max_model_len(target, config, num_pages)
        self.target = target
        self._vocab_size = target.config.vocab_size
        self._eos_ids = eos_ids
        self._rule = Rule.parse(config.acceptance_rule)
        sizes = SchedulerSizes(config.max_num_batched_tokens, config.max_num_seqs, self._policy.max_nodes)
        self._scheduler = Scheduler(self.cache, sizes)
        self._stepper = Stepper(target, self.cache, self._policy)
        self.seconds = StepSeconds()
        self._ids = 0

    @property
    def has_requests(self) -> bool:
        """Whether anything is left to do."""
        return self._scheduler.has_requests

    def drafter_memory_bytes(self) -> int | None:
        """Memory that guessing adds to the target's, as far as the drafters say."""
        return added_memory([self._policy])

    def add(
        self, prompt: Sequence[int], params: SamplingParams, bad_words: Sequence[Sequence[int]] = ()
    ) -> Request:
        """Queue a prompt of token ids; `bad_words` are those of the parameters, as token ids.

        Refuses what cannot be answered before anything runs.
        """
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one")
        bad = next((token for token in prompt if not 0 <= token < self._vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"token id {bad} in the prompt is outside the vocabulary of {self._vocab_size}"
            )
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.max_model_len}, "
                "at least one of them for the answer; shorten the prompt"
            )
        seed = secrets.randbits(64) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        limits = RequestLimits(self.max_model_len, stop_ids)
        words = tuple(tuple(word) for word in bad_words)
        known = TokenLimits(self._vocab_size, tuple(self._eos_ids), words)
        sampler = RequestSampler(params, known, prompt, seed, rule=self._rule)
        request = Request(self._ids, prompt, params, sampler, limits)
        self._scheduler.add(request)
        self._ids += 1
        return request

    def abort(self, request: Request) -> None:
        """Stop working on a request; does nothing if it has ended."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self._remove(request)

    def step(self) -> list[Request]:
        """One target pass; returns the requests that gained tokens, ended ones included."""
        shares = self._scheduler.schedule()
        if not shares:
            return []
        requests = [request for request, _ in shares]
        began = perf_counter()
        for request in requests:
            request.clock.started = request.clock.started or began
        result = self._stepper.step([Scheduled(request, run) for request, run in shares])
        grown = []
        for request, verdict in zip(requests, result.verdicts, strict=True):
            request.clock.passes += 1
            request.clock.drafted += verdict.drafted
            request.clock.accepted += len(verdict.path)
            if verdict.tokens or verdict.error is not None:
                grown.append(request)
                self._note_growth(request)
        self.seconds.add(result, perf_counter() - began)
        return grown

    def _note_growth(self, request: Request) -> None:
        now = perf_counter()
        request.clock.first_token = request.clock.first_token or now
        if request.finish_reason is not None:
            request.clock.finished = now
            self._remove(request)

    def _remove(self, request: Request) -> None:
        self._scheduler.remove(request)
        self._policy.forget(request)


def _num_pages(target: Decoder, config: EngineConfig) -> int:
    page_bytes = target.kv_bytes_per_row() * PAGE_SIZE
    affordable = config.kv_cache_memory_bytes // page_bytes
    if affordable < 1:
        raise RequestError(f"kv_cache_memory_bytes must be at least {page_bytes}, one page of KV")
    useful = -(-target.config.context_length // PAGE_SIZE) * config.max_num_seqs
    return min(affordable, useful)


def _max_model_len(target: Decoder, config: EngineConfig, num_pages: int) -> int:
    possible = min(target.config.context_length, num_pages * PAGE_SIZE)
    if config.max_model_len is None:
        return possible
    if not 1 < config.max_model_len <= possible:
        raise RequestError(f"max_model_len must be in 2 .. {possible}, not {config.max_model_len}")
    return config.max_model_len
