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

NOT_FINITE, ALL_MASKED = int(RowStatus.NOT_FINITE), int(RowStatus.ALL_MASKED)


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
        first_rows = self.first_rows().items()
        return {self.entries[index].kv: row for index, row in first_rows if not len(self.drafts[index])}

    def first_rows(self) -> dict[int, int]:
        """Return, by entry index, the row of the newest token among the judged rows."""
        if self.judging is None:
            return {}
        starts = self.judging.judged.trees.starts[:-1]  # without the end of the last draft
        return dict(zip(self.drawing, starts, strict=True))

    def verdicts(self) -> list[Verdict]:
        """Wait for the pass and return one verdict per entry."""
        verdicts = [NOTHING_DRAWN] * len(self.entries)
        if self.judging is not None:
            if any(draft.device is not None for draft in self.drafts):
                # These drafts were still on the device at launch; the host knows their tokens only now.
                self.judging.set_draft_tokens([self.drafts[index].tokens for index in self.drawing])
            judged_verdicts, judged = self.judging.verdicts(), self.judging.judged
            entries, drafts = self.entries, self.drafts
            for number, index in enumerate(self.drawing):
                verdicts[index] = _verdict(
                    number, entries[index].request, drafts[index], judged, judged_verdicts
                )
        for index, scores in _prompt_scores(self.logits, self.entries, self.drafts).items():
            verdicts[index] = verdicts[index]._replace(prompt_logprobs=tuple(scores))
        return verdicts


def _verdict(
    number: int, request: StepRequest, draft: Draft, judged: Judgement, verdicts: Verdicts
) -> Verdict:
    """Return the verdict of a request, cut where the answer ends; `number` is its index in `judged` and `verdicts`."""
    tokens, path = verdicts.tokens(judged.trees, number), verdicts.paths[number]
    logprobs: tuple[TokenLogprobs, ...] = ()
    kept = request.count_kept(tokens)
    if judged.logprobs[number] >= 0:  # requested, with this number of alternatives
        logprobs = tuple(request_logprobs(judged, verdicts, number)[:kept])
    status = verdicts.statuses[number]
    return Verdict(
        path=tuple(path[:kept]),
        tokens=tuple(tokens[:kept]),
        logprobs=logprobs,
        error=_no_token_error(request) if status == ALL_MASKED else verdicts.error(number),
        is_request_error=status == ALL_MASKED,
        poisoned=status == NOT_FINITE,
        draft=draft,
        draws=verdicts.draws_of(judged.trees, number) if judged.wants_draws else (),
    )


def _no_token_error(request: StepRequest) -> str:
    """Return the error message of a request whose grammar or parameters forbid all tokens."""
    sampler = request.sampler
    if sampler.grammar is not None and sampler.grammar.error:
        return f"the answer's form is too complex to go on with: {sampler.grammar.error}"
    *others, last = sampler.restrictions() or ["the request's parameters"]
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"{listed} leave no token to generate; allow more"


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
    """Return, by entry index, the log-probabilities of the prompt tokens that follow its prompt-scoring rows."""
    scores: dict[int, list[TokenLogprobs]] = {}
    if not any(entry.scored for entry in entries):
        return scores
    row = 0
    for index, (entry, draft) in enumerate(zip(entries, drafts, strict=True)):
        if entry.scored:
            request = entry.request
            assert request.prompt_logprobs is not None
            # Earlier passes scored `request.scored` rows, and this one the next `entry.scored`.
            next_tokens = request.tokens[request.scored + 1 : request.scored + 1 + entry.scored]
            scores[index] = score(logits[row : row + entry.scored], next_tokens, request.prompt_logprobs)
        row += entry.scored + (1 + len(draft) if entry.draws else 0)
    return scores
