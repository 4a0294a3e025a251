"""A drafter that repeats the target's recorded answers, with errors that give a wanted acceptance rate."""

import random
from collections.abc import Mapping, Sequence
from itertools import chain, cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.transfer import HostCopy, uploaded
from foreword.backends.batch import Tap
from foreword.backends.interface import Decoder
from foreword.bench.batch_runs import greedy_requests
from foreword.bench.gpu.engines import DECODED, timed_engine
from foreword.bench.theory import break_even
from foreword.engine.step_pipeline import StepPipeline
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Commit, Drafter, DraftRequest, DraftTask, InFlight, Traits

DEPTH = 5  # draft tokens per pass
PATTERN_DRAFTS = 24  # drafts after which the error pattern repeats

Answers = Mapping[tuple[int, ...], list[int]]  # recorded answers by prompt


def recorded(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> Answers:
    """Return the target's answer to each prompt."""
    engine = timed_engine(decoder, len(prompts[0]), len(prompts))
    wanted = greedy_requests("truth", prompts, 4 * DECODED)
    requests = [request for one in wanted for request in engine.add(one)]
    pipeline = StepPipeline(engine)
    while engine.has_requests or pipeline.is_busy:
        pipeline.advance()
    return {tuple(request.tokens[: request.prompt_len]): request.output_ids for request in requests}


class RecordedDrafter(Drafter):
    """Drafts a recorded text with errors that give `tokens_per_pass`, at most `DEPTH` + 1.

    `cost_drafter` drafts too, so that its time counts.
    """

    def __init__(self, answers: Answers, tokens_per_pass: float, cost_drafter: Drafter | None) -> None:
        rate = break_even(DEPTH, tokens_per_pass)
        assert rate is not None
        self.answers = answers
        self._cost_drafter: Any = cost_drafter
        self._runs = cycle(scripted_runs(rate))  # number of right tokens per draft
        self._known: dict[int, list[int]] = {}  # by request, so that a prompt is looked up once
        self.traits = Traits() if cost_drafter is None else cost_drafter.traits

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        real_drafts = [] if self._cost_drafter is None else self._cost_drafter.propose(tasks)
        scripted = [self._scripted(task) for task in tasks]
        pending = next((draft.device.source for draft in real_drafts if draft.device is not None), None)
        if pending is not None:
            return _replaced_on_device(pending, real_drafts, scripted)
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
            self._known[number] = self.answers[tuple(tokens[:prompt_len])]
        known = self._known[number]
        place = len(tokens) - prompt_len
        tokens_drafted = known[place : place + min(task.max_nodes, task.max_depth)]
        right = next(self._runs)
        if right < len(tokens_drafted):
            tokens_drafted[right] ^= 1
        return tokens_drafted


def _replaced_on_device(
    pending: HostCopy, drafts: Sequence[Draft], scripted: Sequence[list[int]]
) -> list[Draft]:
    """Replace the tokens of drafts on a device by recorded ones, which arrive when the others would."""
    cut = [draft.within(len(tokens), len(tokens)) for draft, tokens in zip(drafts, scripted, strict=True)]
    places = [() if draft.device is None else draft.device.indices for draft in cut]
    right = [tokens[: len(own)] for tokens, own in zip(scripted, places, strict=True)]
    tokens = np.zeros(pending.on_device.numel(), np.int64)
    tokens[list(chain.from_iterable(places))] = list(chain.from_iterable(right))
    pending.copy = torch.from_numpy(tokens)
    pending.source = uploaded(pending.copy, pending.on_device.device)
    return cut


def scripted_runs(rate: float) -> list[int]:
    """Return a fixed pattern of accepted tokens per draft for this acceptance rate.

    Random numbers would make a short run vary by half a token per pass.
    """
    chances = [rate**level for level in range(DEPTH + 1)]
    least = [round(PATTERN_DRAFTS * chance) for chance in chances]  # drafts with at least this many
    runs = [sum(count > place for count in least[1:]) for place in range(PATTERN_DRAFTS)]
    random.Random(0).shuffle(runs)
    return runs
