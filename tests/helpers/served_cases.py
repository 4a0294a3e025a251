"""Requests that a server, streamed or not, and the library must answer alike."""

import random
from dataclasses import dataclass, field
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.engine.llm import LLM
from foreword.engine.outputs import CompletionOutput, RequestOutput

OVERRIDES: tuple[Any, ...] = (
    None,
    True,
    False,
    {"method": "ngram", "num_speculative_tokens": 3, "fixed": True},
    {"method": "suffix", "num_speculative_tokens": 6, "fixed": True},
    {"num_speculative_tokens": 2},
)
"""How requests want to be guessed for; the last is for a server that has a method of its own."""

TEXTS = (
    "the sky the sky the sky",
    "one two one two one two one",
    "def add(first, second):",
    "In 1999 and 2024",
    "She sells sea shells by the sea shore; the shells",
)
OPENAI_FIELDS = frozenset(
    {"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "n", "seed", "stop"}
)


@dataclass(frozen=True)
class Case:
    """One request."""

    chat: bool
    text: str
    params: dict[str, Any]  # fields of SamplingParams but logprobs
    override: Any
    logprobs: int | None = None

    def sampling_params(self, llm: LLM) -> SamplingParams:
        """As the server understands the request: what it doesn't name is the model's default."""
        return llm.loaded.sampling.params(**self.params, logprobs=self.logprobs)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]

    def openai_arguments(self) -> dict[str, Any]:
        """For `create` of the official client."""
        known = {k: v for k, v in self.params.items() if k in OPENAI_FIELDS | {"max_tokens"}}
        extra = {k: v for k, v in self.params.items() if k not in known} | {"speculation": self.override}
        known |= {"messages": self.messages} if self.chat else {"prompt": self.text}
        if self.logprobs is not None:
            known |= (
                {"logprobs": True, "top_logprobs": self.logprobs}
                if self.chat
                else {"logprobs": self.logprobs}
            )
        return {"model": "tiny", **known, "extra_body": extra}


def draw_case(rng: random.Random, tokens: int = 24) -> Case:
    """A request with seeded, mixed parameters."""
    params: dict[str, Any] = {
        "seed": rng.getrandbits(63),
        "max_tokens": rng.randint(1, tokens),
        "temperature": rng.choice((0.0, 0.3, 0.8, 1.0)),
    }
    optional: dict[str, Any] = {
        "n": rng.choice((2, 3)),
        "top_p": rng.choice((0.5, 0.9)),
        "top_k": rng.choice((1, 5, 50)),
        "min_p": 0.05,
        "presence_penalty": rng.choice((-0.5, 1.0)),
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {rng.randint(3, 300): 5.0, 100: -100.0},
        "stop": rng.sample([*"aeiosty12", " t", "he", "\n"], 6),
        "include_stop_str_in_output": True,
        "min_tokens": rng.randint(1, 4),
        "ignore_eos": True,
        "stop_token_ids": [rng.randint(3, 300) for _ in range(30)],
        "bad_words": ["a", "the"],
        "prompt_logprobs": rng.randint(0, 3),
    }
    for name in rng.sample(sorted(optional), rng.randint(0, 5)):
        params[name] = optional[name]
    params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
    logprobs = rng.choice((None, None, 0, 2, 5))
    text = rng.choice(TEXTS)[: rng.randint(5, 60)]
    return Case(rng.random() < 0.5, text, params, rng.choice(OVERRIDES), logprobs)


@dataclass
class Told:
    """What a client was told of one answer, in the library's words."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None
    tokens: list[str] = field(default_factory=list)  # with log probabilities only
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # completions only

    def add(self, choice: Any, chat: bool) -> None:
        """A choice or a chunk's choice of the official client."""
        if chat:
            self.text += (choice.delta if hasattr(choice, "delta") else choice.message).content or ""
        else:
            self.text += choice.text
        self.finish_reason = choice.finish_reason or self.finish_reason
        extra = choice.model_extra
        self.stop_reason = extra.get("stop_reason") if choice.finish_reason else self.stop_reason
        self.seed = extra.get("seed", self.seed)
        if choice.logprobs is not None:
            (self._add_chat if chat else self._add_completion)(choice.logprobs)

    def _add_chat(self, told: Any) -> None:
        for entry in told.content:
            self.tokens.append(entry.token)
            self.logprobs.append(entry.logprob)
            self.top.append({other.token: other.logprob for other in entry.top_logprobs})

    def _add_completion(self, told: Any) -> None:
        self.tokens += told.tokens
        self.logprobs += told.token_logprobs
        self.top += told.top_logprobs
        self.offsets += told.text_offset


@dataclass
class Outcome:
    """What was told of a whole request."""

    answers: list[Told]
    prompt_logprobs: Any = None
    usage: tuple[int, int, int] | None = None

    @staticmethod
    def expected(case: Case, output: RequestOutput) -> "Outcome":
        """What the library's answer must look like to a client."""
        answers = [_expected(case, answer) for answer in output.outputs]
        read, written = len(output.prompt_token_ids), sum(len(a.token_ids) for a in output.outputs)
        scores = output.as_json().get("prompt_logprobs")
        return Outcome(answers, scores, (read, written, read + written))


def _expected(case: Case, answer: CompletionOutput) -> Told:
    told = Told(answer.text, answer.finish_reason, answer.stop_reason, answer.seed)
    offset = 0
    for token, found in zip(answer.token_ids, answer.logprobs or (), strict=False):
        text = found[token].decoded_token
        told.tokens.append(text)
        told.logprobs.append(found[token].logprob)
        listed = list(found.values())[: case.logprobs]
        told.top.append({entry.decoded_token: entry.logprob for entry in listed})
        if not case.chat:
            told.offsets.append(offset)
            offset += len(text)
    return told


def library_outcomes(llm: LLM, cases: list[Case]) -> list[Outcome]:
    """What the library answers, all cases of a kind in one batch, without guessing."""
    outcomes: dict[int, Outcome] = {}
    for chat in (False, True):
        chosen = [i for i, case in enumerate(cases) if case.chat == chat]
        params = [cases[i].sampling_params(llm) for i in chosen]
        outputs = (
            llm.chat([cases[i].messages for i in chosen], params)
            if chat
            else llm.generate([cases[i].text for i in chosen], params, raw=True)
        )
        for i, output in zip(chosen, outputs, strict=True):
            outcomes[i] = Outcome.expected(cases[i], output)
    return [outcomes[i] for i in range(len(cases))]
