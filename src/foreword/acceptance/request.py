"""Sampling state of a request: its parameters as arrays, and counts of its committed tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.acceptance.noise import Keys, Numbers, Stream, branch_keys, extend_keys, stems
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.rules.rule import Rule
from foreword.acceptance.rules.trees import Floats, Ints
from foreword.errors import RequestError
from foreword.structured.thinking import AnswerState

Record = npt.NDArray[np.void]

RECORD = np.dtype(
    [
        ("temperature", "f8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("top_k", "i8"),
        ("presence", "f8"),
        ("frequency", "f8"),
        ("repetition", "f8"),
        ("min_tokens", "i8"),
        (
            "corrects",
            "i8",
        ),  # 1 if a bias, a penalty, bad words, `min_tokens` or allowed tokens change the logits
        ("logprobs", "i8"),  # number of alternatives; -1: no log-probabilities requested
        ("seed", "u8"),
        ("stem", "u8"),  # noise key prefix of the coupled rule
        ("sample", "i8"),  # index among the `n` answers
        ("rule", "i8"),  # a Rule
        ("nonce", "i8"),  # number of committed steps
        ("length", "i8"),  # number of committed tokens, prompt included
        ("generated", "i8"),  # number of generated tokens
    ]
)
"""The numbers of one request that sampling reads. Each has 8 bytes, so that the columns of a batch are aligned."""

_NONCE, _LENGTH, _GENERATED = (RECORD.names.index(name) for name in ("nonce", "length", "generated"))  # type: ignore[union-attr]


@dataclass(frozen=True)
class TokenLimits:
    """Vocabulary limits that apply to a request."""

    vocab_size: int  # valid ids are 0 .. vocab_size - 1
    end_ids: tuple[int, ...] = ()  # the model's end-of-sequence tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # the request's bad_words as token ids


@dataclass(frozen=True)
class DraftSampling:
    """A request's sampling parameters for drafters. Immutable except for `grammar`."""

    vocab_size: int  # valid ids are 0 .. vocab_size - 1
    record_bytes: bytes  # one RECORD
    bias_ids: Ints  # [biased tokens]
    bias_values: Floats  # [biased tokens]
    allowed_ids: Ints | None  # [allowed tokens]; None: all
    rule: Rule  # acceptance rule
    # The request's own grammar state, which advances with every commit: use it only while drafting.
    grammar: AnswerState | None = None

    def keys(self, positions: Numbers, branches: Numbers = 0) -> Keys:
        """Return the drafter's noise keys at these positions: it samples the token argmax(log q + gumbel(key, id)).

        Under *coupled* these are the target's keys. The other rules would be biased if noise were used twice, so their
        keys are of another stream and contain a nonce that changes with every step. `branches` distinguishes tree
        nodes at the same position. Siblings share a key: the first is the token with the largest sum, the second the
        one with the second largest, and so on. This samples without replacement.
        """
        if self.rule is Rule.COUPLED:
            return extend_keys(self._stem, positions)
        return branch_keys(extend_keys(self._stem, positions), branches)

    @cached_property
    def record(self) -> Record:
        return np.ndarray((), RECORD, self.record_bytes)

    @cached_property
    def _stem(self) -> Keys:
        record = self.record
        if self.rule is Rule.COUPLED:
            return np.array([record["stem"]])
        return stems(int(record["seed"]), int(record["sample"]), Stream.DRAFT, int(record["nonce"]))


def stacked_records(samplings: Sequence[DraftSampling]) -> Record:
    """Return the requests' records as one array. Joining their bytes takes a tenth of the time of `np.stack`."""
    return np.frombuffer(b"".join([sampling.record_bytes for sampling in samplings]), RECORD)


class RequestSampler:
    """Sampling state of one request. It depends on committed tokens only: rejected drafts leave no trace."""

    def __init__(
        self,
        params: SamplingParams,
        limits: TokenLimits,
        prompt: Sequence[int],
        seed: int,
        *,
        sample: int = 0,
        rule: Rule = Rule.COUPLED,
        grammar: AnswerState | None = None,
    ) -> None:
        check_against_vocabulary(params, limits)
        self.vocab_size = limits.vocab_size
        self.record_bytes = bytearray(RECORD.itemsize)
        self.record: Record = np.ndarray((), RECORD, self.record_bytes)
        # Updating a counter through `record` takes ten times as long.
        self._counters = memoryview(self.record_bytes).cast("q")
        self._fill_record(params, limits, seed, sample, rule)
        self.bias_ids: Ints = np.fromiter(params.logit_bias.keys(), np.int64)
        self.bias_values: Floats = np.fromiter(params.logit_bias.values(), np.float64)
        self.end_ids: Ints = np.array(sorted({*limits.end_ids, *params.stop_token_ids}), np.int64)
        self.allowed_ids: Ints | None = None
        if params.allowed_token_ids is not None:
            self.allowed_ids = np.unique(np.array(params.allowed_token_ids, np.int64))
        self.bad_words = pad_left(limits.bad_words)  # token ids [words, longest], padded with -1 on the left
        # Whether a penalty depends on which tokens are in the text.
        self._counts_tokens = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        )
        self.record["corrects"] = (
            self._counts_tokens
            or len(self.bias_ids) > 0
            or len(self.bad_words) > 0
            or params.min_tokens > 0
            or self.allowed_ids is not None
        )
        self.grammar = grammar
        self.seen = SeenTokens()
        # The newest committed tokens that may begin a bad word, newest last; -1: no token yet.
        self.tail: Ints = np.full(max(self.bad_words.shape[1] - 1, 0), -1, np.int64)
        self.seed, self.rule = int(seed), rule
        # Whether no parameter makes sampling depend on earlier tokens. Computed once, since every step reads it.
        self._is_memoryless = rule is Rule.COUPLED and not self._counts_tokens and not len(self.tail)
        self._drafting: dict[str, Any] | None = None  # constant part of `drafting()`
        self._add_tokens(prompt, generated=False)

    def _fill_record(
        self, params: SamplingParams, limits: TokenLimits, seed: int, sample: int, rule: Rule
    ) -> None:
        record = self.record
        for name in ("temperature", "top_p", "min_p", "min_tokens"):
            record[name] = getattr(params, name)
        for name in ("presence", "frequency", "repetition"):
            record[name] = getattr(params, f"{name}_penalty")
        record["top_k"] = params.top_k if params.top_k > 0 else limits.vocab_size
        record["logprobs"] = -1 if params.logprobs is None else params.logprobs
        record["seed"], record["sample"], record["rule"] = seed, sample, int(rule)
        record["stem"] = stems(seed, sample, Stream.TARGET, 0)[0]

    @property
    def nonce(self) -> int:
        return self._counters[_NONCE]

    @property
    def can_pipeline(self) -> bool:
        """Return whether a pass can be launched before the token of the previous pass is known on the host."""
        return self._is_memoryless and self.grammar is None

    @property
    def is_ready(self) -> bool:
        """Return whether the next pass can start: it cannot while the mask of a slow grammar is being computed."""
        return self.grammar is None or self.grammar.is_ready

    @property
    def can_draft(self) -> bool:
        """Return whether draft tokens can be verified without delaying the pass."""
        return self.grammar is None or self.grammar.can_draft

    def restrictions(self) -> list[str]:
        """Return the user-visible names of the parameters that forbid tokens, for an error message."""
        is_active = {
            "allowed_token_ids": self.allowed_ids is not None,
            "bad_words": len(self.bad_words) > 0,
            "min_tokens": self.record["min_tokens"] > self.record["generated"],
            "the answer's form": self.grammar is not None,
        }
        return [name for name, active in is_active.items() if active]

    def drafting(self) -> "DraftSampling":
        """Return the sampling parameters that a drafter needs, as of this step."""
        if self._drafting is None:
            corrections = self.bias_ids, self.bias_values, self.allowed_ids
            self._drafting = DraftSampling(
                self.vocab_size, b"", *corrections, self.rule, self.grammar
            ).__dict__
        # Skip `__init__`, which takes longer: this runs in every step, and only the record has changed.
        sampling = object.__new__(DraftSampling)
        fields = sampling.__dict__
        fields.update(self._drafting)
        fields["record_bytes"] = bytes(self.record_bytes)
        return sampling

    def commit(self, tokens: Sequence[int]) -> None:
        """Add the tokens of a committed step, and advance the nonce. If the grammar rejects them, change nothing."""
        if self.grammar is not None:
            self.grammar.commit(tokens)
        self._add_tokens(tokens, generated=True)
        self._counters[_NONCE] += 1

    def _add_tokens(self, tokens: Sequence[int], generated: bool) -> None:
        if self._counts_tokens:
            self.seen.add(tokens, generated)
        if width := len(self.tail):
            newest = np.array(tokens[-width:], np.int64)
            self.tail = np.concatenate([self.tail, newest])[-width:]
        self._counters[_LENGTH] += len(tokens)
        if generated:
            self._counters[_GENERATED] += len(tokens)


def pad_left(sequences: Sequence[Sequence[int]]) -> Ints:
    """Return the sequences as one array [sequences, longest], padded with -1 on the left."""
    longest = max((len(s) for s in sequences), default=0)
    padded = np.full((len(sequences), longest), -1, np.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[longest - len(sequence) :] = sequence
    return padded


def check_against_vocabulary(params: SamplingParams, limits: TokenLimits) -> None:
    """Raise `RequestError` for parameters that are invalid for this vocabulary."""
    vocab = limits.vocab_size
    if params.top_k > vocab:
        raise RequestError(f"top_k must be at most the vocabulary size {vocab}, not {params.top_k}", "top_k")
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > vocab:
            raise RequestError(f"{name} must be at most the vocabulary size {vocab}, not {wanted}", name)
    ids_by_parameter = {
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, ids in ids_by_parameter.items():
        unknown = [token for token in ids if not 0 <= token < vocab]
        if unknown:
            raise RequestError(
                f"{name}: token id {unknown[0]} is not in the vocabulary (0 .. {vocab - 1})", name
            )
    if params.allowed_token_ids is None:
        return
    banned = {word[0] for word in limits.bad_words if len(word) == 1}
    if params.min_tokens:
        banned |= {*limits.end_ids, *params.stop_token_ids}
    if not set(params.allowed_token_ids) - banned:
        raise RequestError(
            "allowed_token_ids: bad_words and min_tokens forbid every one of them; allow more tokens",
            param="allowed_token_ids",
        )


class SeenTokens:
    """Distinct committed tokens in order of first appearance, with their counts in the generated text."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._table: Ints = np.zeros((2, 64), np.int64)  # row 0: ids; row 1: generated counts; columns: slots

    def add(self, tokens: Sequence[int], generated: bool) -> None:
        """Add committed tokens. Only generated ones are counted: those of the prompt get the count 0."""
        for token in tokens:
            slot = self._slots.setdefault(int(token), len(self._slots))
            if slot == self._table.shape[1]:
                self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._table[0, slot] = token
            self._table[1, slot] += generated

    @property
    def ids(self) -> Ints:
        """Token ids, [tokens]."""
        return self._table[0, : len(self._slots)]

    @property
    def generated(self) -> Ints:
        """Count of each token in the generated text, [tokens]."""
        return self._table[1, : len(self._slots)]
