"""Measures speculative decoding with random weights, with drafts of a given acceptance rate.

Random weights cost as much as trained ones; only acceptance differs. So a drafter of the usual shape drafts, and its
tokens are replaced by the target's recorded ones, with errors that give the wanted tokens per pass.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.transfer import HostCopy, uploaded
from foreword.backends.batch import Tap
from foreword.backends.interface import Decoder
from foreword.bench.batch import batch_arm, medians, speedup
from foreword.bench.gpu.engines import DECODED, controlled_engine, random_prompts, timed_engine
from foreword.bench.random_heads import METHODS, head_drafter, random_head
from foreword.bench.skeleton import take_turns
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationSetting
from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.pipeline import StepPipeline
from foreword.progress import StageProgress
from foreword.speculation.draft import DeviceTokens, Draft
from foreword.speculation.drafting import Commit, Drafter, DraftRequest, DraftTask, InFlight, Traits

DEPTH = 5
"""Draft tokens per pass."""

PATTERN_DRAFTS = 24
"""Drafts after which the error pattern repeats."""

WARM_UP, RUNS = 2, 3
"""Warm-up runs, which capture graphs, and measured runs, whose median counts."""


@dataclass(frozen=True)
class SpeculativeSpeed:
    """One drafter at one batch size."""

    drafter: str
    batch: int
    tokens_per_pass: float  # per request
    tokens_per_second: float
    step_ms: float
    draft_ms: float  # per step


class RecordedDrafter(Drafter):
    """Drafts a recorded text with a given acceptance rate; `cost_drafter` drafts too, so that its time counts."""

    def __init__(
        self, truth: dict[tuple[int, ...], list[int]], rate: float, cost_drafter: Drafter | None
    ) -> None:
        """Create a drafter of the answers in `truth`, which maps prompts to answers."""
        self._truth = truth
        self._cost_drafter: Any = cost_drafter
        self._runs = cycle(scripted_runs(rate))  # number of right tokens per draft
        self._known: dict[int, list[int]] = {}  # by request, so that a prompt is looked up once
        self.traits = Traits() if cost_drafter is None else cost_drafter.traits

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        real_drafts = [] if self._cost_drafter is None else self._cost_drafter.propose(tasks)
        scripted = [self._scripted(task) for task in tasks]
        pending = next((draft.device.source for draft in real_drafts if draft.device is not None), None)
        if pending is not None:
            return _replaced_on_device(pending, tasks, scripted)
        return [
            Draft.chain(tokens, len(task.request.tokens), task.request.epoch)
            for tokens, task in zip(scripted, tasks, strict=True)
        ]

    def observe(self, commits: Sequence[Commit]) -> None:
        if self._cost_drafter is not None and self.traits.needs:
            self._cost_drafter.observe(commits)

    def draft_early(self, unjudged: Sequence[InFlight], hidden: Mapping[Tap, Tensor], drawn: Tensor) -> bool:
        return bool(self._cost_drafter.draft_early(unjudged, hidden, drawn))

    def forget(self, request: DraftRequest) -> None:
        self._known.pop(request.request_id, None)
        if self._cost_drafter is not None:
            self._cost_drafter.forget(request)

    def _scripted(self, task: DraftTask) -> list[int]:
        tokens, prompt_len, number = task.request.tokens, task.request.prompt_len, task.request.request_id
        if number not in self._known:
            self._known[number] = self._truth[tuple(tokens[:prompt_len])]
        known = self._known[number]
        place = len(tokens) - prompt_len
        tokens_drafted = known[place : place + min(task.max_nodes, task.max_depth)]
        right = next(self._runs)
        if right < len(tokens_drafted):
            tokens_drafted[right] ^= 1
        return tokens_drafted


def _replaced_on_device(
    pending: HostCopy, tasks: Sequence[DraftTask], scripted: Sequence[list[int]]
) -> list[Draft]:
    """Return recorded tokens as drafts on the device, with the arrival time of the other drafter's tokens."""
    tokens = torch.tensor([token for its in scripted for token in its])
    on_device = uploaded(tokens, pending.on_device.device)
    source = HostCopy(on_device, tokens, pending.arrived, pending.began)
    source.is_cold = pending.is_cold
    ends = list(accumulate(map(len, scripted), initial=0))
    return [
        Draft.on_device(
            DeviceTokens(source, tuple(range(first, end))), len(task.request.tokens), task.request.epoch
        )
        for task, (first, end) in zip(tasks, pairwise(ends), strict=True)
    ]


def scripted_runs(rate: float) -> list[int]:
    """Return a fixed pattern of accepted tokens per draft for this acceptance rate.

    Random numbers would make a short run vary by half a token per pass.
    """
    chances = [rate**level for level in range(DEPTH + 1)]
    least = [round(PATTERN_DRAFTS * chance) for chance in chances]  # drafts with at least this many
    runs = [sum(count > place for count in least[1:]) for place in range(PATTERN_DRAFTS)]
    random.Random(0).shuffle(runs)
    return runs


def rate_for(tokens_per_pass: float, depth: int) -> float:
    """Return the acceptance rate for this many tokens per pass."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        made = sum(rate**level for level in range(depth + 1))
        low, high = (rate, high) if made < tokens_per_pass else (low, rate)
    return low


def measure_speculation(
    decoder: Decoder,
    draft_decoder: Decoder,
    *,
    batches: Sequence[int],
    context: int,
    progress: StageProgress,
) -> list[SpeculativeSpeed]:
    """Measure free drafts (like a lookup) at 3.0 tokens per pass, an EAGLE-3 head and a draft model at 3.9."""
    head = head_drafter(decoder, random_head(decoder, "eagle3"))
    texts = max(batches, default=1) * (context + 6 * DECODED)
    draft_model = AutoregressiveDrafter(
        draft_decoder, decoder.config.vocab_size, DraftingSize(kv_tokens=texts, rows_per_pass=2048)
    )
    cases = [("free", 3.0, None), ("eagle3", 3.9, head), ("draft model", 3.9, draft_model)]
    found = []
    for place, batch in enumerate(batches):
        prompts = random_prompts(decoder, context, batch)
        truth = recorded(decoder, prompts)
        for number, (name, wanted, cost_drafter) in enumerate(cases):
            progress(f"{name}, batch {batch}", place * len(cases) + number, len(batches) * len(cases))
            drafter = RecordedDrafter(truth, rate_for(wanted, DEPTH), cost_drafter)
            found.append(_speculative_speed(decoder, name, prompts, drafter))
    return found


def measure_heads(
    decoder: Decoder,
    *,
    batches: Sequence[int],
    context: int,
    progress: StageProgress,
    methods: Sequence[str] = METHODS,
) -> list[SpeculativeSpeed]:
    """Measure every kind of head at 3.9 tokens per pass, with its own runner and in plain torch."""
    found: list[SpeculativeSpeed] = []
    texts = {size: random_prompts(decoder, context, size) for size in batches}
    cases = [(size, prompts, recorded(decoder, prompts)) for size, prompts in texts.items()]
    stages = 2 * len(methods) * len(cases)
    for method in methods:
        head = random_head(decoder, method)
        for name in (method, f"{method} in torch"):
            cost_drafter = head_drafter(decoder, head, is_reference=name != method)
            for size, prompts, truth in cases:
                progress(f"{name}, batch {size}", len(found), stages)
                drafter = RecordedDrafter(truth, rate_for(3.9, DEPTH), cost_drafter)
                found.append(_speculative_speed(decoder, name, prompts, drafter))
    return found


def recorded(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Return the target's answer to each prompt."""
    engine = timed_engine(decoder, len(prompts[0]), len(prompts))
    params = SamplingParams(temperature=0, max_tokens=4 * DECODED, ignore_eos=True)
    requests = [
        engine.add(NewRequest(f"truth-{index}", tuple(prompt), params))[0]
        for index, prompt in enumerate(prompts)
    ]
    pipeline = StepPipeline(engine)
    while engine.has_requests or pipeline.is_busy:
        pipeline.advance()
    return {tuple(request.tokens[: request.prompt_len]): request.output_ids for request in requests}


def _speculative_speed(
    decoder: Decoder, name: str, prompts: Sequence[Sequence[int]], drafter: Drafter
) -> SpeculativeSpeed:
    engine = timed_engine(decoder, len(prompts[0]), len(prompts), FixedPolicy(drafter, DEPTH))
    arms = {name: batch_arm(engine, prompts, DECODED, speculate=False)}
    runs = sorted(take_turns(arms, RUNS, warm_up=WARM_UP)[name], key=lambda run: run.tokens_per_second)
    run = runs[RUNS // 2]
    draft_ms = 1e3 * run.draft_seconds / run.steps
    return SpeculativeSpeed(
        name, run.batch, run.tokens_per_pass, run.tokens_per_second, run.step_ms, draft_ms
    )


HEAD_TOKENS_PER_PASS = (3.9, 1.2)
"""Tokens per pass with full drafts of the two heads."""

CONTROL_ARMS: Mapping[str, SpeculationSetting] = {"plain": False, "controller": None}

ROUNDS = 6
"""Measured windows per arm."""

WARM_UP_WINDOWS = 4
"""Warm-up windows: graphs are captured, and the controller learns."""


@dataclass(frozen=True)
class ControlledSpeed:
    """The controller at one batch size."""

    batch: int
    offered: float  # tokens per pass with full drafts
    plain_tokens_per_second: float
    tokens_per_second: float
    ratio: float  # of neighbouring windows
    lowest: float  # lowest ratio
    tokens_per_pass: float  # per request


def measure_controller(
    decoder: Decoder,
    *,
    batches: Sequence[int],
    context: int,
    progress: StageProgress,
    rounds: int = ROUNDS,
) -> list[ControlledSpeed]:
    """Compare controller and plain decoding at every batch size, with a head of high and one of low acceptance."""
    head = head_drafter(decoder, random_head(decoder, "eagle3"))
    found: list[ControlledSpeed] = []
    stages = len(batches) * len(HEAD_TOKENS_PER_PASS)
    for batch in batches:
        prompts = random_prompts(decoder, context, batch)
        truth = recorded(decoder, prompts)
        for quality in HEAD_TOKENS_PER_PASS:
            progress(f"batch {batch}, {quality} offered", len(found), stages)
            drafter = RecordedDrafter(truth, rate_for(quality, DEPTH), head)
            engine = controlled_engine(decoder, context, batch, drafter, DEPTH)
            found.append(_compared(engine, prompts, quality, rounds))
    return found


def _compared(
    engine: EngineCore, prompts: Sequence[Sequence[int]], offered: float, rounds: int
) -> ControlledSpeed:
    arms = {name: batch_arm(engine, prompts, DECODED, setting) for name, setting in CONTROL_ARMS.items()}
    plain, controlled = take_turns(arms, rounds, warm_up=WARM_UP_WINDOWS, alternate=True).values()
    ratios = speedup(controlled, plain)
    (plain_rate,) = medians(plain, "tokens_per_second")
    rate, per_pass = medians(controlled, "tokens_per_second", "tokens_per_pass")
    return ControlledSpeed(plain[0].batch, offered, plain_rate, rate, median(ratios), min(ratios), per_pass)
