"""Logits to verdicts, for every request of a pass."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement, Verdicts
from foreword.acceptance.judge import judge
from foreword.acceptance.logprobs import TokenLogprobs, request_logprobs, score
from foreword.speculation.draft import Draft, stack
from foreword.speculation.transaction import Part
from foreword.speculation.verdict import NOTHING_DRAWN, Verdict


def accept(logits: Tensor, parts: Sequence[Part], drafts: Sequence[Draft]) -> list[Verdict]:
    """Judge the draft of every request whose next token can be drawn; `logits` has the rows of all, in order.

    A part's rows are those that score its prompt, then its newest token's, then its nodes'.
    """
    verdicts = [NOTHING_DRAWN] * len(parts)
    scores, judged_rows = _split(logits, parts, drafts)
    drawing = [index for index, part in enumerate(parts) if part.draws]
    if drawing:
        trees = stack([drafts[index] for index in drawing])
        judged = Judgement.of(judged_rows, trees, [parts[index].request.sampler for index in drawing])
        found = judge(judged)
        for place, index in enumerate(drawing):
            verdicts[index] = _verdict(place, parts[index], drafts[index], judged, found)
    for index, found_scores in scores.items():
        verdicts[index] = replace(verdicts[index], prompt_logprobs=tuple(found_scores))
    return verdicts


def _verdict(place: int, part: Part, draft: Draft, judged: Judgement, found: Verdicts) -> Verdict:
    """What the request at this place of the judged batch commits: it may end inside the accepted path."""
    block = found.tokens(judged.trees, place)
    kept = part.request.kept(block)
    logprobs = request_logprobs(judged, found, place)[:kept]
    path = found.path(place)[:kept]
    return Verdict(
        tuple(path),
        tuple(block[:kept]),
        tuple(logprobs),
        error=found.error(place),
        drafted=len(draft),
        depth=max(draft.depths(), default=0),
        draft_tokens=draft.tokens,
        draft_parents=draft.parents,
    )


def _split(
    logits: Tensor, parts: Sequence[Part], drafts: Sequence[Draft]
) -> tuple[dict[int, list[TokenLogprobs]], Tensor]:
    """The prompt scores by part, and the rows that are judged."""
    if not any(part.scored for part in parts):
        return {}, logits
    scores: dict[int, list[TokenLogprobs]] = {}
    judged: list[int] = []
    row = 0
    for index, (part, draft) in enumerate(zip(parts, drafts, strict=True)):
        if part.scored:
            scores[index] = _scores(logits[row : row + part.scored], part)
        row += part.scored
        if part.draws:
            judged += range(row, row + 1 + len(draft))
            row += 1 + len(draft)
    return scores, logits[torch.tensor(judged, dtype=torch.int64, device=logits.device)]


def _scores(rows: Tensor, part: Part) -> list[TokenLogprobs]:
    request = part.request
    assert request.prompt_logprobs is not None
    following = request.tokens[request.scored + 1 : request.scored + 1 + part.scored]
    return score(rows, following, request.prompt_logprobs)
