"""Computes tokens per target pass without running speculation: chains from every position, then a walk."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.train.heads.learner import Learner
from foreword.train.passes.loss import CHUNK
from foreword.train.passes.packing import BatchSize, PackedBatch, pack, tail_begin
from foreword.train.passes.target import wide_logits
from foreword.train.texts.documents import Document


@dataclass(frozen=True)
class TauReport:
    """Tokens per pass of chains of `depth` draft tokens."""

    depth: int
    tokens: dict[str, int]  # by kind: committed tokens after each answer's first
    passes: dict[str, int]  # by kind: target passes
    first_hit: float  # fraction of positions with a right first draft token
    by_level: tuple[float, ...] = ()  # by level, given that all before are right

    def tau(self, kind: str | None = None) -> float:
        kinds = [kind] if kind is not None else list(self.tokens)
        return sum(self.tokens[name] for name in kinds) / max(sum(self.passes[name] for name in kinds), 1)

    def by_kind(self) -> dict[str, float]:
        return {kind: self.tau(kind) for kind in sorted(self.tokens)}


@torch.no_grad()
def measure_tau(learner: Learner, documents: Sequence[Document], size: BatchSize, depth: int) -> TauReport:
    """Evaluate greedy chains along texts that the target wrote greedily: exact up to rounding.

    Draft token s counts only if all before it equal the text, so the text's tokens are fed to it.
    """
    tokens: dict[str, int] = {}
    passes: dict[str, int] = {}
    first_hits = first_places = 0
    reached, right = [0] * depth, [0] * depth
    for group in _groups(documents, size):
        batch = pack(group, size, learner.target.device)
        hits, counts = _hits(learner, batch, depth)
        first_hits += int((hits[0] & counts).sum())
        first_places += int(counts.sum())
        accepted = hits.long().cumprod(0).sum(0).tolist()  # accepted draft tokens from each position
        begin = 0
        for document in group:
            length = len(document.tokens) - tail_begin(document)
            runs = walk(accepted[begin : begin + length], document, depth)
            tokens[document.kind] = tokens.get(document.kind, 0) + sum(runs) + len(runs)
            passes[document.kind] = passes.get(document.kind, 0) + len(runs)
            begin += length
            for run in runs[:-1]:  # the last may be cut by the answer's end
                for level in range(min(run + 1, depth)):
                    reached[level] += 1
                    right[level] += level < run
    by_level = tuple(part / max(whole, 1) for part, whole in zip(right, reached, strict=True))
    return TauReport(depth, tokens, passes, first_hits / max(first_places, 1), by_level)


def walk(accepted: Sequence[int], document: Document, depth: int) -> list[int]:
    """Return the accepted draft tokens of every pass over the document's first answer.

    Prefill yields the first token. `accepted` counts from the slot `tail_begin`; the slot before the newest token
    determines the next pass.
    """
    first = tail_begin(document)
    newest = document.answer_begin
    answer_end = newest + int(document.is_answer[newest:].argmin() or len(document.is_answer) - newest)
    runs = []
    while newest + 1 < answer_end:
        runs.append(min(accepted[newest - 1 - first], depth, answer_end - newest - 2))
        newest += runs[-1] + 1
    return runs


def _hits(learner: Learner, batch: PackedBatch, depth: int) -> tuple[Tensor, Tensor]:
    """bool [draft tokens, tails]: equal to the text; and which tail rows predict an answer token."""
    target, token_ids_of = learner.target, learner.vocabulary.token_ids
    features = target.features(batch, learner.taps)
    hits = []
    for step, states in enumerate(learner.steps(batch, features, depth)):
        token_ids, counts = batch.predicted(step)
        matrix = learner.output(step).to(target.dtype)
        draft_tokens = torch.cat(
            [
                wide_logits(states[begin : begin + CHUNK], matrix).argmax(-1)
                for begin in range(0, len(states), CHUNK)
            ]
        )
        hits.append((token_ids_of[draft_tokens] == token_ids) & counts)
    return torch.stack(hits), batch.predicted(0)[1]


def _groups(documents: Iterable[Document], size: BatchSize) -> Iterable[list[Document]]:
    """Group documents in order, as many as fit."""
    group: list[Document] = []
    heads, tails = size.rows - size.tails, size.tails
    for document in documents:
        head = tail_begin(document)
        tail = len(document.tokens) - head
        if head > size.rows - size.tails or tail > size.tails:
            continue
        if group and (head > heads or tail > tails):
            yield group
            group = []
            heads, tails = size.rows - size.tails, size.tails
        group.append(document)
        heads, tails = heads - head, tails - tail
    if group:
        yield group
