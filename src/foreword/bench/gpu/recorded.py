"""A drafter that repeats the target's recorded answers, with errors that give a wanted acceptance rate."""

import random
from collections.abc import Mapping, Sequence
from itertools import cycle
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
    requests = [engine.add(new)[0] for new in greedy_requests("truth", prompts, 4 * DECODED)]
    pipeline = StepPipeline(engine)
    while engine.has_requests or pipeline.is_busy:
        pipeline.advance()
    return {tuple(request.tokens[: request.prompt_len]): request.output_ids for request in requests}


class RecordedDrafter(Drafter):
    """Drafts recorded answers with errors, so that `tokens_per_pass` tokens (at most `DEPTH` + 1) are committed.

    `cost_drafter` drafts too, so that its time counts; its tokens are replaced.
    """

    def __init__(self, answers: Answers, tokens_per_pass: float, cost_drafter: Drafter | None) -> None:
        rate = break_even(DEPTH, tokens_per_pass)
        assert rate is not None
        self.answers = answers
        self._cost_drafter: Any = cost_drafter
        self._right_tokens = cycle(scripted_runs(rate))  # number of right tokens of each draft
        self._known: dict[int, list[int]] = {}  # answers by request, so that a prompt is looked up once
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
        """Return the recorded continuation of a request, with one wrong token where the script says."""
        tokens, prompt_len, number = task.request.tokens, task.request.prompt_len, task.request.request_id
        if number not in self._known:
            self._known[number] = self.answers[tuple(tokens[:prompt_len])]
        begin = len(tokens) - prompt_len
        drafted = self._known[number][begin : begin + min(task.max_nodes, task.max_depth)]
        right = next(self._right_tokens)
        if right < len(drafted):
            drafted[right] ^= 1  # another token id
        return drafted


def _replaced_on_device(
    pending: HostCopy, drafts: Sequence[Draft], scripted: Sequence[list[int]]
) -> list[Draft]:
    """Return the drafts with the scripted tokens, which are on the device and arrive when the drafts' own would.

    `pending` is the array of all drafts' tokens.
    """
    cut = [draft.within(len(tokens), len(tokens)) for draft, tokens in zip(drafts, scripted, strict=True)]
    tokens = np.zeros(pending.on_device.numel(), np.int64)
    for draft, of_draft in zip(cut, scripted, strict=True):
        if draft.device is not None:
            indices = list(draft.device.indices)
            tokens[indices] = of_draft[: len(indices)]
    pending.copy = torch.from_numpy(tokens)
    pending.source = uploaded(pending.copy, pending.on_device.device)
    return cut


def scripted_runs(rate: float) -> list[int]:
    """Return the number of accepted tokens of each of `PATTERN_DRAFTS` drafts, for this acceptance rate.

    The numbers are fixed: random ones would make a short measurement vary by half a token per pass.
    """
    # Number of drafts of which at least 1, 2, ... DEPTH tokens are accepted.
    drafts_at_least = [round(PATTERN_DRAFTS * rate**level) for level in range(1, DEPTH + 1)]
    accepted = [sum(count > draft for count in drafts_at_least) for draft in range(PATTERN_DRAFTS)]
    random.Random(0).shuffle(accepted)
    return accepted
