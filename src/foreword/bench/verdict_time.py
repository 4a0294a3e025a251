"""Measures host time from a pass's verdict to the launch of the next pass; passes and drafters take no time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import process_time
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from foreword.acceptance.transfer import HostCopy
from foreword.backends.batch import ForwardBatch, ForwardOutput, Tap
from foreword.backends.interface import Decoder, HeadCall, HeadOutput, HeadRunner, KvStore, PendingChains
from foreword.bench.host_time import CONTEXT, GROUP, VOCABULARY, FreePasses, add_texts, usual_next
from foreword.bench.skeleton import staged
from foreword.control.fixed import FixedPolicy
from foreword.drafters.heads.eagle import StepwiseHead
from foreword.drafters.heads.loading import DraftVocabulary, LoadedHead
from foreword.engine.core import EngineCore
from foreword.engine.text import Vocabulary
from foreword.kv.spec import RowSpec
from foreword.progress import StageProgress
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftTask

DRAFT_TOKENS = 5  # draft tokens per request and step
WIDTH = 8  # width of hidden states, whose values are not read

TokenIds = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class VerdictTime:
    """CPU time of the phases of a speculative step; medians of several groups of steps."""

    guesses: str  # drafter
    batch: int
    tokens: float  # per request and step
    verdict_ms: float  # acceptance, commit and notification of drafters
    launch_ms: float  # scheduling, drafting and layout until the next pass is launched
    beside_ms: float  # work that overlaps with the pass: early drafting, bookkeeping

    @property
    def waited_ms(self) -> float:
        """Time that a device waits, apart from drafting on it."""
        return self.verdict_ms + self.launch_ms


def measure_verdicts(
    like: Decoder, batches: Sequence[int], groups: int, on_progress: StageProgress
) -> list[VerdictTime]:
    """Measure steps with a lookup, and with a head that drafts early, at every batch size."""
    drafters: Mapping[str, Callable[[], Drafter]] = {"lookup": KnownDrafts, "head": free_head}
    return [
        _measure(like, name, make(), batch, groups)
        for batch in staged(batches, on_progress, "verdicts, batch {}".format)
        for name, make in drafters.items()
    ]


def _measure(like: Decoder, name: str, drafter: Drafter, batch: int, groups: int) -> VerdictTime:
    """Measure groups of steps with one drafter; `like` is a decoder whose config the simulated one takes."""
    most_tokens = ((groups + 1) * GROUP + 2) * (DRAFT_TOKENS + 1)  # if every draft token is accepted
    target = _TappedPasses(like, CONTEXT + most_tokens + 1)
    policy = FixedPolicy(drafter, DRAFT_TOKENS)
    parts = target.engine_parts(batch, DRAFT_TOKENS, policy, max_draft_share=1e9, enable_prefix_caching=False)
    engine = EngineCore(cast(Decoder, target), Vocabulary(VOCABULARY), parts)
    add_texts(engine, batch, most_tokens)
    # The first group has prefill and one-time work, and does not count.
    _, *timed = _timed_groups(engine, target, drafter, [GROUP + 1, *[GROUP] * groups])
    engine.close()
    tokens, *seconds_by_phase = zip(*timed, strict=True)
    milliseconds = [1e3 * median(seconds) / GROUP for seconds in seconds_by_phase]
    return VerdictTime(name, batch, sum(tokens) / (groups * GROUP * batch), *milliseconds)


def _timed_groups(
    engine: EngineCore, target: "_TappedPasses", drafter: Drafter, sizes: Sequence[int]
) -> Iterator[tuple[int, float, float, float]]:
    """Run groups of this many steps as on a device: each pass is launched before the bookkeeping of the previous one.

    Yield the tokens of each group, and the CPU seconds of verdicts, of launches and of overlapped work.
    """
    in_flight = engine.launch()
    for steps in sizes:
        tokens, verdict, launch, overlapped = 0, 0.0, 0.0, 0.0
        for _ in range(steps):
            assert in_flight is not None
            began, lookup_before = process_time(), getattr(drafter, "spent", 0.0)
            report = engine.commit(in_flight)
            judged_at = process_time()
            in_flight = engine.launch()
            launched_at = target.launched_at
            tokens += sum(len(delta.token_ids) for delta in engine.settle(report))
            verdict += judged_at - began
            # The time of the lookup does not count.
            launch += launched_at - judged_at - (getattr(drafter, "spent", 0.0) - lookup_before)
            overlapped += process_time() - launched_at - target.spent_last
        yield tokens, verdict, launch, overlapped


class _TappedPasses(FreePasses):
    """A decoder whose hidden states are zeros, and which records when its last pass was launched."""

    launched_at = 0.0  # seconds of `process_time`
    spent_last = 0.0  # CPU seconds of the last pass

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        self.launched_at = process_time()
        logits = super().forward(batch, store).logits
        hidden = {tap: torch.zeros(len(batch.hidden_rows), WIDTH) for tap in batch.taps}
        self.spent_last = process_time() - self.launched_at
        return ForwardOutput(logits, hidden)


class KnownDrafts(Drafter):
    """A lookup that drafts the text's usual continuation; its time does not count."""

    def __init__(self) -> None:
        self.spent = 0.0  # CPU seconds so far

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        began = process_time()
        newest = np.array([task.request.tokens[-1] for task in tasks])
        draft_rows = _draft_rows(newest).tolist()
        self.spent += process_time() - began
        return [
            Draft.chain(
                tokens[: min(task.max_nodes, task.max_depth)], len(task.request.tokens), task.request.epoch
            )
            for tokens, task in zip(draft_rows, tasks, strict=True)
        ]


def free_head() -> StepwiseHead:
    """Return a head that drafts early, and whose passes compute nothing."""
    vocabulary = DraftVocabulary(None, VOCABULARY, torch.device("cpu"))
    taps = (Tap(0), Tap(1))
    return StepwiseHead(
        LoadedHead(cast(HeadRunner, _FreeChains()), RowSpec("free", 1, 1, 1), taps, vocabulary), 1
    )


class _FreeChains:
    """Runner of a head that drafts the text's usual continuation."""

    drafts_early = True
    stops = False
    weight_bytes = 0

    def draft(self, call: HeadCall) -> HeadOutput | PendingChains:
        arrays = call.rows.arrays
        if call.plan is None:
            wanted = len(arrays.logit_rows)
            return HeadOutput(torch.zeros(wanted, VOCABULARY), torch.zeros(wanted, WIDTH))
        judged = call.plan.unsettled
        if judged is None:
            newest = arrays.token_ids[arrays.logit_rows]
        else:  # drafting early: the newest token follows the draft tokens that will be accepted
            drawn = judged.drawn.numpy()
            # [requests, draft tokens]: the tokens in flight (-1: none), and the rows of what the target draws there.
            drafted = np.where(judged.draft_indices < 0, -1, judged.drafted.numpy()[judged.draft_indices])
            rows = judged.first_rows[:, None] + np.arange(drafted.shape[1])
            is_right = drafted == drawn[np.minimum(rows, len(drawn) - 1)]
            accepted = np.cumprod(is_right, axis=1).sum(axis=1)  # a wrong token ends the accepted path
            newest = drawn[judged.first_rows + accepted]
        tokens = torch.from_numpy(_draft_rows(newest).astype(np.int64).ravel())
        places = [range(DRAFT_TOKENS * row, DRAFT_TOKENS * row + DRAFT_TOKENS) for row in range(len(newest))]
        return PendingChains(HostCopy(tokens, tokens), places)


def _draft_rows(newest: TokenIds) -> TokenIds:
    """Return the drafts [texts, DRAFT_TOKENS] after these newest tokens, which are right until a text deviates."""
    columns = []
    for _ in range(DRAFT_TOKENS):
        newest = usual_next(newest)
        columns.append(newest)
    return np.stack(columns, axis=1)
