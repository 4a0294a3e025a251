"""Computes the tokens per target pass of a learner, without running speculation.

Chains are drafted at every position of texts that the target wrote. Their acceptance follows from the texts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.train.heads.learner import Learner
from foreword.train.passes.loss import CHUNK
from foreword.train.passes.packing import BatchSize, PackedBatch, grouped, pack, tail_begin
from foreword.train.passes.target import wide_logits
from foreword.train.texts.documents import Document


@dataclass(frozen=True)
class TauReport:
    """Tokens per pass with chains of `depth` draft tokens."""

    depth: int
    tokens: dict[str, int]  # committed tokens after each answer's first, by kind of text
    passes: dict[str, int]  # target passes, by kind of text
    first_hit: float  # fraction of positions with a right first draft token
    by_level: tuple[float, ...] = ()  # acceptance of each level, given that all levels before are right

    def tau(self, kind: str | None = None) -> float:
        """Return the tokens per pass over one kind of text, or over all."""
        kinds = [kind] if kind is not None else list(self.tokens)
        tokens = sum(self.tokens[name] for name in kinds)
        return tokens / max(sum(self.passes[name] for name in kinds), 1)

    def by_kind(self) -> dict[str, float]:
        return {kind: self.tau(kind) for kind in sorted(self.tokens)}


@torch.no_grad()
def measure_tau(learner: Learner, documents: Sequence[Document], size: BatchSize, depth: int) -> TauReport:
    """Evaluate greedy chains on texts that the target wrote greedily; the result is exact up to rounding.

    On sampled texts it is a lower bound: a served head samples its chains with the request's own noise.
    A draft token counts only if all draft tokens before it equal the text, so the learner may read the text instead.
    """
    tokens, passes = Counter[str](), Counter[str]()
    first_hits = first_positions = 0
    # For each level: passes that verified a draft token of this level, and passes that accepted it.
    num_verified, num_accepted = [0] * depth, [0] * depth
    for group in grouped(documents, size, look_ahead=1):
        batch = pack(group, size, learner.target.device)
        hits, counts = _hits(learner, batch, depth)
        first_hits += int((hits[0] & counts).sum())
        first_positions += int(counts.sum())
        accepted = hits.long().cumprod(0).sum(0).tolist()  # accepted draft tokens from each position
        begin = 0
        for document in group:
            length = len(document.tokens) - tail_begin(document)
            accepted_by_pass = walk(accepted[begin : begin + length], document, depth)
            tokens[document.kind] += sum(accepted_by_pass) + len(accepted_by_pass)
            passes[document.kind] += len(accepted_by_pass)
            begin += length
            for count in accepted_by_pass[:-1]:  # without the last pass, which the answer's end may have cut
                for level in range(min(count + 1, depth)):
                    num_verified[level] += 1
                    num_accepted[level] += level < count
    by_level = tuple(hits / max(count, 1) for hits, count in zip(num_accepted, num_verified, strict=True))
    return TauReport(depth, dict(tokens), dict(passes), first_hits / max(first_positions, 1), by_level)


def walk(accepted: Sequence[int], document: Document, depth: int) -> list[int]:
    """Return the number of accepted draft tokens in every pass of the document's first answer.

    `accepted` has the number of accepted draft tokens for each row from `tail_begin` on. Prefill samples the first
    token. The next pass verifies the chain drafted by the row before the newest token.
    """
    first = tail_begin(document)
    newest = document.answer_begin
    # `argmin` is the length of the answer, or 0 if the text ends with the answer.
    answer_end = newest + int(document.is_answer[newest:].argmin() or len(document.is_answer) - newest)
    accepted_by_pass: list[int] = []
    while newest + 1 < answer_end:
        # The target's own token is the last of the answer at the latest.
        accepted_by_pass.append(min(accepted[newest - 1 - first], depth, answer_end - newest - 2))
        newest += accepted_by_pass[-1] + 1
    return accepted_by_pass


def _hits(learner: Learner, batch: PackedBatch, depth: int) -> tuple[Tensor, Tensor]:
    """Return which draft tokens equal the text [draft tokens, tails], and which tail rows predict an answer token."""
    target, token_ids_of = learner.target, learner.vocabulary.token_ids
    features = target.features(batch, learner.taps)
    hits = []
    for step, states in enumerate(learner.steps(batch, features, depth)):
        token_ids, in_answer = batch.predicted(step)
        matrix, previous = learner.output(step).to(target.dtype), batch.input_tokens(step)
        draft_tokens = []
        for begin in range(0, len(states), CHUNK):
            part = slice(begin, begin + CHUNK)
            logits = wide_logits(states[part], matrix)
            draft_tokens.append(learner.draft_logits(logits, states[part], previous[part]).argmax(-1))
        hits.append((token_ids_of[torch.cat(draft_tokens)] == token_ids) & in_answer)
    return torch.stack(hits), batch.predicted(0)[1]
