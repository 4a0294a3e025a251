"""Turns the logits of a pass into one verdict per request."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement, RowStatus, Verdicts
from foreword.acceptance.judge import Judging
from foreword.acceptance.logprobs import TokenLogprobs, request_logprobs, score
from foreword.acceptance.transfer import uploaded
from foreword.kv.sequence import KvSequence
from foreword.speculation.draft import Draft, stack
from foreword.speculation.requests import NOTHING_DRAWN, PassEntry, StepRequest, Verdict

OK, NOT_FINITE, ALL_MASKED = int(RowStatus.OK), int(RowStatus.NOT_FINITE), int(RowStatus.ALL_MASKED)


class Acceptance(NamedTuple):
    """Acceptance of the drafts of one pass, in progress.

    The *judged rows* of the logits are the rows of newest tokens and of draft tokens, without prompt-scoring rows.
    """

    entries: Sequence[PassEntry]
    drafts: Sequence[Draft]  # [entries]
    logits: Tensor  # [rows, vocabulary]
    drawing: Sequence[int]  # indices of the entries whose next token is sampled
    judging: Judging | None  # None: no entry's next token is sampled

    @staticmethod
    def begin(
        logits: Tensor, entries: Sequence[PassEntry], drafts: Sequence[Draft], wants_draws: bool = False
    ) -> "Acceptance":
        """Start acceptance on the logits' device.

        `logits` has, for each entry in order, its prompt-scoring rows, the row of its newest token, and the rows of
        its draft tokens. With `wants_draws`, verdicts have the target's sampled token after every node.
        """
        drawing = [index for index, entry in enumerate(entries) if entry.draws]
        if not drawing:
            return Acceptance(entries, drafts, logits, drawing, None)
        trees = stack([drafts[index] for index in drawing])
        judgement = Judgement.of(
            _judged_rows(logits, entries, drafts),
            trees,
            [entries[index].request.sampler for index in drawing],
            wants_draws,
            [entries[index].pending for index in drawing],
        )
        judging = Judging(judgement)
        judging.begin()
        return Acceptance(entries, drafts, logits, drawing, judging)

    @property
    def drawn_tokens(self) -> Tensor | None:
        """The token sampled after each judged row, int64 [judged rows], on the logits' device; None: no such row."""
        return None if self.judging is None else self.judging.drawn_tokens

    def drawn_at(self) -> dict[KvSequence, int]:
        """Return, by KV sequence, the index in `drawn_tokens` of the next token of every entry without a draft."""
        rows = self.first_rows().items()
        return {self.entries[index].kv: row for index, row in rows if not len(self.drafts[index])}

    def first_rows(self) -> dict[int, int]:
        """Return, by entry index, the row of the newest token among the judged rows."""
        if self.judging is None:
            return {}
        *starts, _ = self.judging.judged.trees.starts  # the last one is the end of the last draft
        return dict(zip(self.drawing, starts, strict=True))

    def verdicts(self) -> list[Verdict]:
        """Wait for the pass and return one verdict per entry."""
        verdicts = [NOTHING_DRAWN] * len(self.entries)
        if self.judging is not None:
            if any(draft.device is not None for draft in self.drafts):
                # These drafts were still on the device at launch; the host knows their tokens only now.
                self.judging.set_draft_tokens([self.drafts[index].tokens for index in self.drawing])
            found, judged = self.judging.verdicts(), self.judging.judged
            entries, drafts = self.entries, self.drafts
            for place, index in enumerate(self.drawing):
                verdicts[index] = _verdict(place, entries[index].request, drafts[index], judged, found)
        for index, scores in _prompt_scores(self.logits, self.entries, self.drafts).items():
            verdicts[index] = verdicts[index]._replace(prompt_logprobs=tuple(scores))
        return verdicts


def _verdict(place: int, request: StepRequest, draft: Draft, judged: Judgement, found: Verdicts) -> Verdict:
    """Return the verdict of the request with the index `place` in the judgement, cut where the answer ends."""
    tokens, path = found.tokens(judged.trees, place), found.paths[place]
    logprobs: tuple[TokenLogprobs, ...] = ()
    kept = request.count_kept(tokens)
    if judged.logprobs[place] >= 0:  # requested, with this number of alternatives
        logprobs = tuple(request_logprobs(judged, found, place)[:kept])
    status = found.states[place]
    return Verdict(
        path=tuple(path[:kept]),
        tokens=tuple(tokens[:kept]),
        logprobs=logprobs,
        error=None if status == OK else _error(request, found, place),
        is_request_error=status == ALL_MASKED,
        poisoned=status == NOT_FINITE,
        draft=draft,
        draws=found.draws_of(judged.trees, place) if judged.wants_draws else (),
    )


def _error(request: StepRequest, found: Verdicts, place: int) -> str | None:
    """Return why the request cannot continue."""
    if found.states[place] != ALL_MASKED:
        return found.error(place)
    sampler = request.sampler
    if sampler.grammar is not None and sampler.grammar.error:
        return f"the answer's form is too complex to go on with: {sampler.grammar.error}"
    *others, last = sampler.restrictions() or ["the request's parameters"]
    named = f"{', '.join(others)} and {last}" if others else last
    return f"{named} leave no token to generate; allow more"


def _judged_rows(logits: Tensor, entries: Sequence[PassEntry], drafts: Sequence[Draft]) -> Tensor:
    """Return the judged rows of the logits, [judged rows, vocabulary]."""
    if not any(entry.scored for entry in entries):
        return logits
    judged: list[int] = []
    row = 0
    for entry, draft in zip(entries, drafts, strict=True):
        row += entry.scored
        if entry.draws:
            judged += range(row, row + 1 + len(draft))
            row += 1 + len(draft)
    return logits[uploaded(torch.tensor(judged), logits.device)]


def _prompt_scores(
    logits: Tensor, entries: Sequence[PassEntry], drafts: Sequence[Draft]
) -> dict[int, list[TokenLogprobs]]:
    """Return the prompt log-probabilities by entry index."""
    scores: dict[int, list[TokenLogprobs]] = {}
    if not any(entry.scored for entry in entries):
        return scores
    row = 0
    for index, (entry, draft) in enumerate(zip(entries, drafts, strict=True)):
        if entry.scored:
            scores[index] = _scores(logits[row : row + entry.scored], entry)
        row += entry.scored + (1 + len(draft) if entry.draws else 0)
    return scores


def _scores(rows: Tensor, entry: PassEntry) -> list[TokenLogprobs]:
    """Return the log-probabilities of the prompt tokens that follow an entry's prompt-scoring rows.

    `rows` are the logits of the prompt-scoring rows, [rows, vocabulary].
    """
    request = entry.request
    assert request.prompt_logprobs is not None
    # Earlier passes scored `request.scored` rows, and this one the next `entry.scored`.
    following = request.tokens[request.scored + 1 : request.scored + 1 + entry.scored]
    return score(rows, following, request.prompt_logprobs)
