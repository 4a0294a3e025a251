"""Sampling parameters of a request."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from foreword.errors import RequestError
from foreword.structured.params import StructuredOutputs, Thinking

MIN_TEMPERATURE = 1e-6
"""Minimum temperature: below it scaled logits overflow float32; 0 itself means greedy."""

MAX_LOGPROBS = 64
"""Maximum number of alternatives per token with log-probabilities."""

MAX_SAMPLES = 128
"""Maximum number of answers to one prompt."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling and stopping; names and meanings follow OpenAI and vLLM."""

    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0  # keep the most likely tokens up to this total probability; 1: all
    top_k: int = 0  # keep the k most likely tokens; 0 or -1: all
    min_p: float = 0.0  # minimum probability relative to the most likely token; 0: no limit
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the generated text
    # Subtracted from a token's logit once per occurrence in the generated text
    frequency_penalty: float = 0.0
    # Divides positive logits, and multiplies negative ones, of tokens in the prompt or in the generated text.
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    bad_words: tuple[str, ...] = ()  # texts that must not be generated
    allowed_token_ids: tuple[int, ...] | None = None  # the only tokens that may be generated; None: all
    stop: str | tuple[str, ...] = ()  # the answer ends before any of these texts
    include_stop_str_in_output: bool = False  # keep the stop text in the answer
    stop_token_ids: tuple[int, ...] = ()  # the answer ends after any of these tokens
    max_tokens: int = 256  # maximum number of generated tokens
    min_tokens: int = 0  # no end-of-sequence or stop token before this many generated tokens
    n: int = 1  # number of answers to the prompt
    seed: int | None = None  # None: a random one, which is returned with the answer
    ignore_eos: bool = False  # continue after an end-of-sequence token
    # Number of alternatives with log-probabilities, besides the chosen token; None: no log-probabilities.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # as `logprobs`, for prompt tokens
    structured: StructuredOutputs | None = None  # response format; None: any text
    # Tags of the reasoning block, for its token budget and for a response format that begins after it; else None.
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        self._check_filters()
        self._check_ids()
        self._check_lengths()
        self._check_structured()

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_filters(self) -> None:
        _finite("temperature", self.temperature)
        if self.temperature != 0 and self.temperature < MIN_TEMPERATURE:
            _refuse("temperature", self.temperature, f"0 (greedy) or a number >= {MIN_TEMPERATURE}")
        if not 0 < _finite("top_p", self.top_p) <= 1:
            _refuse("top_p", self.top_p, "above 0 and at most 1")
        if _integer("top_k", self.top_k) < -1:
            _refuse("top_k", self.top_k, "a positive integer, or 0 or -1 for no limit")
        for name, low, high in (("min_p", 0, 1), ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2)):
            if not low <= _finite(name, getattr(self, name)) <= high:
                _refuse(name, getattr(self, name), f"in {low} .. {high}")
        if _finite("repetition_penalty", self.repetition_penalty) <= 0:
            _refuse("repetition_penalty", self.repetition_penalty, "above 0")

    def _check_ids(self) -> None:
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token)
            if not -100 <= _finite("logit_bias", bias) <= 100:
                _refuse("logit_bias", bias, "in -100 .. 100 for every token")
        for name, texts in (("bad_words", self.bad_words), ("stop", self.stop_texts)):
            if isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts):
                _refuse(name, texts, "a list of non-empty strings")
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            _refuse("allowed_token_ids", [], "None or at least one token id")
        for name in ("allowed_token_ids", "stop_token_ids"):
            for token in getattr(self, name) or ():
                _integer(name, token)

    def _check_lengths(self) -> None:
        if _integer("max_tokens", self.max_tokens) < 1:
            _refuse("max_tokens", self.max_tokens, "at least 1")
        if not 0 <= _integer("min_tokens", self.min_tokens) <= self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"in 0 .. max_tokens ({self.max_tokens})")
        if self.seed is not None and not 0 <= _integer("seed", self.seed) < 2**64:
            _refuse("seed", self.seed, "in 0 .. 2**64 - 1")
        if not 1 <= _integer("n", self.n) <= MAX_SAMPLES:
            _refuse("n", self.n, f"in 1 .. {MAX_SAMPLES}")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None and not 0 <= _integer(name, wanted) <= MAX_LOGPROBS:
                _refuse(name, wanted, f"None or in 0 .. {MAX_LOGPROBS}")

    def _check_structured(self) -> None:
        if self.structured is None:
            return
        object.__setattr__(self, "structured", StructuredOutputs.of(self.structured))
        if self.ignore_eos:
            raise RequestError(
                "ignore_eos: a structured output ends where its grammar ends; leave out ignore_eos",
                param="ignore_eos",
            )


def _finite(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        _refuse(name, value, "a finite number")
    return value


def _integer(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        _refuse(name, value, "an integer")
    return value


def _refuse(name: str, value: object, wanted: str) -> None:
    raise RequestError(f"{name} must be {wanted}, not {value!r}", name)


GENERATION_CONFIGS = ("auto", "none")
"""Default sampling parameters. `auto`: those recommended by the model's makers; `none`: those of `SamplingParams`."""


@dataclass(frozen=True)
class SamplingDefaults:
    """A model's recommended sampling parameters."""

    values: dict[str, float] = field(default_factory=dict)  # fields of SamplingParams

    def params(self, **given: Any) -> SamplingParams:  # noqa: ANN401 - fields of SamplingParams
        """Return the parameters of a request: the `given` values that are not None, and the defaults of the others."""
        explicit = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**self.values, **explicit})

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())


def check_generation_config(name: str) -> None:
    """Raise `RequestError` unless the name is one of `GENERATION_CONFIGS`."""
    if name not in GENERATION_CONFIGS:
        raise RequestError(f"generation config {name!r} is unknown; use {' or '.join(GENERATION_CONFIGS)}")
