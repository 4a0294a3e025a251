"""Drafts are compared with the text that came, whether or not they were verified."""

import math
from dataclasses import dataclass

from foreword.control.learning.estimates import PairEstimate
from foreword.control.learning.rates import LEAST_SHIFT, MOST_SHIFT, SHIFT_STEP
from foreword.speculation.confidence import class_of
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.verdict import Verdict

FORGETTING = 0.94
"""What a request's own record weighs after one more draft."""

OWN_STRENGTH = 12.0
"""Drafts' first levels that a request's record is shrunk with."""


@dataclass(slots=True)
class RequestFit:
    """How well a drafter does for one request, compared with its cohort."""

    pair: PairEstimate
    shift: int = 0  # its luck
    _accepted: float = 0.0
    _expected: float = 0.0

    def finished(self, accepted: int, expected: float) -> None:
        """One more draft was judged to its end."""
        self._accepted = FORGETTING * self._accepted + accepted
        self._expected = FORGETTING * self._expected + expected
        own = OWN_STRENGTH * self.pair.rates.expected[0]
        luck = math.log((self._accepted + own) / (self._expected + own)) if own else 0.0
        self.shift = min(max(round(luck / SHIFT_STEP), LEAST_SHIFT), MOST_SHIFT)
        self.pair.finished(accepted, expected)


@dataclass(slots=True)
class Waiting:
    """A draft whose text has not come to its end yet."""

    fit: RequestFit
    draft: Draft
    asked: int  # levels
    kept: int  # levels of what came that were worth verifying
    node: int = ROOT  # the deepest node that the text went through
    level: int = 0
    expected: float = 0.0

    def follow(self, tokens: list[int]) -> bool:
        """Go on along the text; True when nothing is left to be seen."""
        draft, pair = self.draft, self.fit.pair
        if draft.is_chain:
            return self._follow_chain(tokens)
        rates = pair.rates.expected
        while (place := draft.committed_len + self.level) < len(tokens):
            children = [node for node, parent in enumerate(draft.parents) if parent == self.node]
            if not children:
                self._ended(self.level)
                return self._end()
            found = next((r for r, node in enumerate(children) if draft.tokens[node] == tokens[place]), None)
            pair.judged(self.level, len(children), found)
            self.expected += rates[min(self.level, len(rates) - 1)]
            if found is None:
                return self._end()
            self.node, self.level = children[found], self.level + 1
        return False

    def _follow_chain(self, tokens: list[int]) -> bool:
        """The same, where no node has siblings: nearly always."""
        guesses, start, first = self.draft.tokens, self.level, self.draft.committed_len
        level, grown = start, len(tokens) - first
        end = min(len(guesses), grown)
        while level < end and guesses[level] == tokens[first + level]:
            level += 1
        is_stopped = level < end
        self._judge_run(start, level, is_stopped)
        self.level = level
        # What comes behind a draft's end is not seen before the text has grown beyond it.
        return self._end() if is_stopped or level == len(guesses) < grown else False

    def _judge_run(self, start: int, level: int, is_stopped: bool) -> None:
        """Nodes of a chain from level `start` on were right up to this one, which was wrong if it stopped there."""
        counts, kept = self.fit.pair.counts, self.kept
        sure = self.draft.confidence if self.draft.is_chain else ()
        self.expected += sum(self.fit.pair.rates.node_chances(self.draft)[start : level + is_stopped])
        # Of levels that were not worth verifying nothing is known but what their class says.
        if start < kept:
            counts.judged_run(start, min(level, kept) - start, is_stopped and level < kept)
            if level >= kept:
                self._ended(kept)
        if sure:
            for place in range(start, level + is_stopped):
                counts.judged_sure(class_of(sure[place]), place < level)

    def _ended(self, level: int) -> None:
        """All that was worth verifying was right, and it had no such level."""
        if level < self.asked:
            self.fit.pair.counts.ended_at(level)

    def judge(self, verdict: Verdict) -> None:
        """What a rule has said about it, where acceptance is not a matter of equal tokens."""
        accepted, depth = len(verdict.path), verdict.draft.depth
        self._judge_run(0, accepted, is_stopped=accepted < depth)
        self.level = accepted
        self._end()

    def _end(self) -> bool:
        self.fit.finished(self.level, self.expected)
        return True
