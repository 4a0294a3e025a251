"""Logits to verdicts, for every request of a pass."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement, RowStatus, Verdicts
from foreword.acceptance.judge import judge
from foreword.acceptance.logprobs import TokenLogprobs, request_logprobs, score
from foreword.speculation.draft import Draft, stack
from foreword.speculation.requests import PassEntry
from foreword.speculation.verdict import NOTHING_DRAWN, Verdict


def accept(
    logits: Tensor, entries: Sequence[PassEntry], drafts: Sequence[Draft], wants_draws: bool = False
) -> list[Verdict]:
    """Judge the draft of every request whose next token can be drawn; `logits` has the rows of all, in order.

    An entry's rows are those that score its prompt, then its newest token's, then its nodes'. `wants_draws`: a drafter
    needs the target's own draws, which not every rule makes.
    """
    verdicts = [NOTHING_DRAWN] * len(entries)
    scores, judged_rows = _split(logits, entries, drafts)
    drawing = [index for index, entry in enumerate(entries) if entry.draws]
    if drawing:
        trees = stack([drafts[index] for index in drawing])
        samplers = [entries[index].request.sampler for index in drawing]
        judged = Judgement.of(judged_rows, trees, samplers, wants_draws)
        found = judge(judged)
        for place, index in enumerate(drawing):
            verdicts[index] = _verdict(place, entries[index], drafts[index], judged, found)
    for index, found_scores in scores.items():
        verdicts[index] = replace(verdicts[index], prompt_logprobs=tuple(found_scores))
    return verdicts


def _verdict(place: int, entry: PassEntry, draft: Draft, judged: Judgement, found: Verdicts) -> Verdict:
    """What the request at this place of the judged batch commits: it may end inside the accepted path."""
    block = found.tokens(judged.trees, place)
    kept = entry.request.kept(block)
    logprobs = request_logprobs(judged, found, place)[:kept]
    path = found.path(place)[:kept]
    return Verdict(
        tuple(path),
        tuple(block[:kept]),
        tuple(logprobs),
        error=_error(entry, found, place),
        poisoned=found.states[place] == RowStatus.NOT_FINITE,
        draft=draft,
        draws=found.draws_of(judged.trees, place),
    )


def _error(entry: PassEntry, found: Verdicts, place: int) -> str | None:
    """Why the request cannot go on; where its grammar gave up, in the parser's words."""
    error, grammar = found.error(place), entry.request.sampler.grammar
    if (
        error is not None
        and found.states[place] == RowStatus.ALL_MASKED
        and grammar is not None
        and grammar.error
    ):
        return f"the answer's form is too complex to go on with: {grammar.error}"
    return error


def _split(
    logits: Tensor, entries: Sequence[PassEntry], drafts: Sequence[Draft]
) -> tuple[dict[int, list[TokenLogprobs]], Tensor]:
    """The prompt scores by entry, and the rows that are judged."""
    if not any(entry.scored for entry in entries):
        return {}, logits
    scores: dict[int, list[TokenLogprobs]] = {}
    judged: list[int] = []
    row = 0
    for index, (entry, draft) in enumerate(zip(entries, drafts, strict=True)):
        if entry.scored:
            scores[index] = _scores(logits[row : row + entry.scored], entry)
        row += entry.scored
        if entry.draws:
            judged += range(row, row + 1 + len(draft))
            row += 1 + len(draft)
    return scores, logits[torch.tensor(judged, dtype=torch.int64, device=logits.device)]


def _scores(rows: Tensor, entry: PassEntry) -> list[TokenLogprobs]:
    request = entry.request
    assert request.prompt_logprobs is not None
    following = request.tokens[request.scored + 1 : request.scored + 1 + entry.scored]
    return score(rows, following, request.prompt_logprobs)
