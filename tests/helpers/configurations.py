"""Ways to run the same requests that must not show in their text."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.control.policy import MeasuredPolicy
from foreword.control.settings import ControlSettings
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.loader import LoadedModel
from foreword.engine.messages import NewRequest
from foreword.speculation.protocols import Drafter

FORMS: tuple[dict[str, Any], ...] = (
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "jacobi"},
    {"method": "lookahead"},
    {"method": "layer_skip", "exit_layer": 12},
    {"method": "layer_skip", "exit_layer": 20, "tree_width": 3},
    {"method": "self_quantized", "bits": 4},
    {"method": "self_quantized", "bits": 3, "tree_width": 2},
    {"method": ["suffix", "layer_skip"], "combine": "merge"},
    {"method": ["ngram", "self_quantized"], "combine": "first"},
    {"method": ["suffix", "layer_skip"], "combine": "route"},
)
"""Every drafter that needs no other model, chains and trees."""

RESTLESS = ControlSettings(
    margin_on=-1.0,
    margin_off=0.0,
    dwell_steps=2,
    decision_steps=1,
    probe_share=0.5,
    idle_probe_share=0.5,
    reference_share=0.2,
    reference_window=2,
    guard_ratio=10.0,
    guard_retry_seconds=0.01,
)
"""Changes its mind at every step: whatever a policy can do happens."""


@dataclass(frozen=True)
class Wanted:
    """A request before anyone decides how to run it."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams  # with a seed


@dataclass(frozen=True)
class Configuration:
    """One way to run requests; `seed` draws what is left to chance."""

    seed: int
    max_running: int = 1  # 1: each alone
    max_rows: int = 512
    kv_rows: int = 1 << 14  # of the KV cache
    prefix_caching: bool = False
    forms: tuple[dict[str, Any], ...] = ()  # of speculation; every request has one of them or none
    max_depth: int = 0
    preempt_share: float = 0.0  # chance per half of a step that some request loses its KV
    arrives_late: float = 0.0  # chance per step that no new request comes
    most_answers: int = 8  # cap on n
    measured: bool = False  # whether the measured policy decides, with many tries, plain windows and alarms

    @staticmethod
    def draw(seed: int) -> "Configuration":
        """Anything."""
        rng = random.Random(seed)
        forms = [(), (rng.choice(FORMS),), FORMS]
        max_rows = rng.choice((4, 17, 33, 64, 130, 512))
        often = 0.1 if max_rows > 32 else 0.02  # small chunks make it long to compute anything again
        return Configuration(
            seed,
            max_running=rng.choice((1, 2, 3, 7, 16, 16)),
            max_rows=max_rows,
            kv_rows=rng.choice((512, 1 << 12, 1 << 14)),
            prefix_caching=rng.random() < 0.5,
            forms=rng.choice((*forms, *forms[1:])),
            max_depth=rng.choice((1, 2, 4, 8, 20)),
            preempt_share=rng.choice((0.0, 0.01, often)),
            arrives_late=rng.choice((0.0, 0.5)),
            most_answers=rng.choice((1, 2, 8)),
            measured=rng.random() < 0.5,
        )


@dataclass(frozen=True)
class Answer:
    """What a user sees."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None

    def with_more(self, tokens: Sequence[int], text: str, finish_reason: str | None) -> "Answer":
        """The answer goes on."""
        return Answer((*self.tokens, *tokens), self.text + text, finish_reason)


class Runner:
    """Runs settings on one loaded model in any configuration; drafters are made once."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._drafters: dict[str, Drafter] = {}
        self.accepted = 0
        self.preemptions = 0

    def encode(self, text: str) -> list[int]:
        """A prompt as tokens."""
        return self._model.tokenizer.encode(text)

    def answers(self, settings: Sequence[Wanted], how: Configuration) -> dict[tuple[str, int], Answer]:
        """All answers, by request and index."""
        core, rng = self._core(how), random.Random(how.seed)
        coming = rng.sample(settings, len(settings))
        told: dict[tuple[str, int], Answer] = {}
        while coming or core.has_requests:
            if coming and (not core.has_requests or rng.random() >= how.arrives_late):
                core.add(self._request(coming.pop(), how, rng))
            _maybe_preempt(core, how, rng)
            under_way = core.launch()
            _maybe_preempt(core, how, rng)
            for delta in core.resolve(under_way) if under_way is not None else ():
                key = (delta.request_id, delta.index)
                so_far = told.get(key, Answer())
                told[key] = so_far.with_more(delta.token_ids, delta.text, delta.finish_reason)
        core.check_integrity()
        assert not core.faults, core.faults
        stats = core.stats()
        self.accepted += sum(accepted for _, _, accepted in stats.acceptance.values())
        self.preemptions += stats.preemptions
        return told

    def _core(self, how: Configuration) -> EngineCore:
        decoder = self._model.decoder
        config = EngineConfig(
            kv_cache_memory_bytes=how.kv_rows * decoder.kv_rows().bytes_per_row,
            max_num_batched_tokens=how.max_rows,
            max_num_seqs=how.max_running,
            enable_prefix_caching=how.prefix_caching,
            max_draft_share=100.0,
        )
        policy = MeasuredPolicy(RESTLESS) if how.measured else FixedPolicy()
        return EngineCore(decoder, self._model.vocabulary(), EngineParts(config, policy, self._drafter))

    def _drafter(self, config: SpeculationConfig) -> Drafter:
        key = repr((config.method, config.combine, config.options))
        if key not in self._drafters:
            self._drafters[key] = self._model.build_drafter(config)
        return self._drafters[key]

    def _request(self, setting: Wanted, how: Configuration, rng: random.Random) -> NewRequest:
        form = rng.choice((*how.forms, False)) if how.forms else False
        speculation = (
            {**form, "num_speculative_tokens": how.max_depth, "draft_timeout": 60.0} if form else False
        )
        params = replace(setting.params, n=min(setting.params.n, how.most_answers))
        return NewRequest(setting.name, setting.prompt, params, speculation=speculation)


def _maybe_preempt(core: EngineCore, how: Configuration, rng: random.Random) -> None:
    running = core.scheduler.running
    if running and rng.random() < how.preempt_share:
        core.scheduler.preempt(rng.choice(running))


def draw_requests(
    count: int, encode: Callable[[str], Sequence[int]], max_tokens: int, seed: int
) -> list[Wanted]:
    """Requests with mixed parameters, several of them about the same things."""
    rng = random.Random(seed)
    shapes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.0, "top_k": 40, "frequency_penalty": 0.4},
        {"temperature": 0.6, "min_p": 0.05, "presence_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 1.2, "logit_bias": {28: 2.0}, "stop": (".", "\n\n")},
        {"temperature": 0.7, "bad_words": ("the",), "min_tokens": 5},
        {"temperature": 0.9, "logprobs": 2},
    ]
    settings = []
    for index in range(count):
        prompt = rng.choice(TOPICS)
        if rng.random() < 0.3:
            prompt = INSTRUCTIONS + prompt
        params = SamplingParams(
            **rng.choice(shapes),
            seed=rng.randrange(1 << 60),
            max_tokens=max_tokens,
            n=rng.choice((1, 1, 1, 2, 3)),
            ignore_eos=rng.random() < 0.5,
        )
        settings.append(Wanted(f"setting-{index}", tuple(encode(prompt)), params))
    return settings


INSTRUCTIONS = (
    "You are careful. Answer in plain words, say what you are not sure of, and keep to what was asked. "
)
TOPICS = (
    "Count: 1, 2, 3, 4, 5, 6, 7,",
    "The cat sat on the mat. The cat sat on the mat. The cat",
    "Why is the sky blue?",
    "def quicksort(values):\n    if len(values) < 2:\n        return values\n",
    "Translate to French: Good morning, how are you today?",
    "Once upon a time, in a village by the sea, there lived",
    "apple, pear, plum, apple, pear, plum, apple,",
    "A",
)
