"""Plans chains that a head's runner drafts in one call.

A chain may also start early, before the verdict on the pass in flight. Its text then ends with tokens of that pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from torch import Tensor

from foreword.acceptance.request import DraftSampling, stacked_records
from foreword.acceptance.rules.rule import Rule
from foreword.acceptance.transfer import HostCopy
from foreword.backends.interface import ChainPlan, Chains, ChainStop, PendingChains, Unsettled
from foreword.drafters.heads.in_pages import RowRange
from foreword.drafters.heads.loading import DraftVocabulary
from foreword.drafters.next_level import has_fixed_corrections
from foreword.kv.sequence import KvSequence
from foreword.speculation.confidence import CLASSES, EDGES, Stop
from foreword.speculation.draft import DeviceTokens, Draft, mark_cold
from foreword.speculation.drafting import Commit, DraftTask, InFlight

_EDGES = np.array(EDGES, np.float32)
_NEVER_STOPS = (1.0,) * CLASSES


def plan_chains(
    tasks: Sequence[DraftTask], max_tokens: Sequence[int], vocabulary: DraftVocabulary, stops: bool = False
) -> ChainPlan | None:
    """Plan chains of at most `max_tokens` tokens per task; return None if a draft must carry its q.

    With `stops`, the runner ends chains according to the tasks' `stop`.
    """
    samplings = [task.request.sampling for task in tasks]
    if not all(needs_only_logits(sampling) for sampling in samplings):
        return None
    depths = [
        min(task.max_nodes, task.max_depth, limit) for task, limit in zip(tasks, max_tokens, strict=True)
    ]
    has_stop = stops and any(task.stop is not None for task in tasks)
    return ChainPlan(
        np.array([len(task.request.tokens) for task in tasks], np.int32),
        np.array(depths, np.int32),
        stacked_records(samplings),
        vocabulary.token_ids,
        vocabulary.vocab_size,
        stop=_stop_of(tuple([task.stop for task in tasks]), max(depths)) if has_stop else None,
    )


# Cached, since the stopping rules change only when the policy re-evaluates them.
@lru_cache(maxsize=256)
def _stop_of(stops: tuple[Stop | None, ...], max_depth: int) -> ChainStop:
    """Return the stopping rules of chains of up to `max_depth` tokens, one rule per chain; None: it never stops."""
    rates = np.array([_NEVER_STOPS if stop is None else stop.rates for stop in stops], np.float32)
    least = np.zeros((len(stops), max_depth), np.float32)
    for row, stop in zip(least, stops, strict=True):
        limits = () if stop is None else stop.least[:max_depth]
        row[: len(limits)] = limits
    return ChainStop(_EDGES, rates, least)


def plan_after_pass(plan: ChainPlan, unjudged: Sequence[InFlight], drawn: Tensor) -> ChainPlan:
    """Return the plan for texts that a pass in flight is extending; the drafts of that pass are on one device."""
    longest = max([len(entry.draft) for entry in unjudged])
    # Each draft's indices among the tokens on the device, padded with -1.
    indices = [(*entry.tokens.indices, *[-1] * (longest - len(entry.draft))) for entry in unjudged]
    ends = [0 if entry.task.pages is None else entry.task.pages.kv.reserved for entry in unjudged]
    unsettled = Unsettled(
        drawn,
        np.array([entry.drawn_at for entry in unjudged], np.int32),
        unjudged[0].tokens.source.on_device,
        np.array(indices, np.int32),
        np.array(ends, np.int32),
    )
    return replace(plan, lengths=plan.lengths + 1, unsettled=unsettled)


def drafts_of_chains(tasks: Sequence[DraftTask], chains: Chains) -> list[Draft]:
    """Return the chains as drafts."""
    if isinstance(chains, PendingChains):
        source = chains.tokens
        return [
            Draft.on_device(
                DeviceTokens(source, tuple(indices)), len(task.request.tokens), task.request.epoch
            )
            for task, indices in zip(tasks, chains.token_indices, strict=True)
        ]
    confidences = chains.confidence or [()] * len(tasks)
    drafts = [
        Draft.chain(tokens, len(task.request.tokens), task.request.epoch, confidence=confidence)
        for task, tokens, confidence in zip(tasks, chains.tokens, confidences, strict=True)
    ]
    return list(mark_cold(drafts, chains.is_cold))


def needs_only_logits(sampling: DraftSampling) -> bool:
    """Return whether the tokens of a draft depend only on the head's logits, and need no distribution q."""
    needs_q = sampling.rule is not Rule.COUPLED and sampling.record["temperature"] > 0
    return not needs_q and not has_fixed_corrections(sampling)


@dataclass
class EarlyChain:
    """A chain started early, and the KV rows of the tokens by which the pass in flight may extend the text."""

    draft: Draft  # the draft that the pass in flight verifies
    kv: KvSequence
    first: int  # first row computed: the text's length before the pass
    pages: list[int]  # pages of these rows, as far as the text can grow
    tokens: DeviceTokens  # tokens of the early chain
    length: int | None = None  # length of the text that it follows; None: no verdict yet, or the pass failed

    @staticmethod
    def of(unjudged: InFlight, source: HostCopy, indices: Sequence[int]) -> "EarlyChain":
        """Return the early chain of a request in flight; its tokens are at these indices of `source`."""
        pages, first = unjudged.task.pages, len(unjudged.task.request.tokens)
        assert pages is not None
        size = pages.cache.page_size
        row_pages = pages.kv.pages[first // size : (first + len(unjudged.draft)) // size + 1]
        return EarlyChain(unjudged.draft, pages.kv, first, row_pages, DeviceTokens(source, tuple(indices)))

    def record_verdict(self, commit: Commit) -> bool:
        """Record the verdict; return False if the commit belongs to another pass."""
        is_same_pass = self.length is None and commit.draft is self.draft
        self.length = commit.first + commit.rows + 1  # the newest token has no row yet
        return is_same_pass

    def draft_after(self, row_range: RowRange, task: DraftTask) -> Draft | None:
        """Return the draft if the chain follows this text, is long enough, and the rows of the range are computed."""
        kv, wanted = row_range.pages.kv, min(task.max_nodes, task.max_depth)
        if self.kv is not kv or self.first != row_range.first or self.length != row_range.end:
            return None
        size = row_range.pages.cache.page_size
        row_pages = kv.pages[row_range.first // size : (row_range.end - 1) // size + 1]
        if wanted > len(self.tokens.indices) or row_pages != self.pages[: len(row_pages)]:
            return None
        tokens = self.tokens if wanted == len(self.tokens.indices) else self.tokens.pick(range(wanted))
        return Draft.on_device(tokens, row_range.end, task.request.epoch)


class EarlyChains:
    """Stores the chains that were started early, by request."""

    def __init__(self) -> None:
        self._early: dict[int, EarlyChain] = {}  # by request id

    def keep(self, request_id: int, chain: EarlyChain) -> None:
        self._early[request_id] = chain

    def observe(self, commits: Sequence[Commit]) -> None:
        """Record the commits of a pass."""
        if self._early:
            for commit in commits:
                chain = self._early.get(commit.request.request_id)
                if chain is not None and not chain.record_verdict(commit):
                    self.forget(commit.request.request_id)

    def take(self, row_range: RowRange, task: DraftTask) -> Draft | None:
        """Remove the request's chain, and return its draft if it fits the text and the task."""
        chain = self._early.pop(task.request.request_id, None)
        return None if chain is None else chain.draft_after(row_range, task)

    def forget(self, request_id: int) -> None:
        self._early.pop(request_id, None)


def join_sources(drafts: Sequence[Draft]) -> list[Draft]:
    """Return the drafts with all their device tokens in one source, since a pass reads only one."""
    on_device = [draft.device.source for draft in drafts if draft.device is not None]
    sources = list({id(source): source for source in on_device}.values())
    if len(sources) < 2:
        return list(drafts)
    joined, offset, offsets = HostCopy.joined(sources), 0, {}
    for source in sources:
        offsets[id(source)] = offset
        offset += source.on_device.numel()
    result = list(drafts)
    for number, draft in enumerate(drafts):
        if (tokens := draft.device) is not None:
            indices = tuple([offsets[id(tokens.source)] + index for index in tokens.indices])
            moved = DeviceTokens(joined, indices)
            result[number] = Draft.on_device(moved, draft.committed_len, draft.epoch)
    return result
