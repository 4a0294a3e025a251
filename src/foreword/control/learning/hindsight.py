"""Drafts are compared with the text that came, whether or not they were verified."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreword.control.learning.estimates import LEAST_SHIFT, MOST_SHIFT, SHIFT_STEP, PairEstimate
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
    node: int = ROOT  # the deepest node that the text went through
    level: int = 0
    expected: float = 0.0

    def follow(self, tokens: list[int]) -> bool:
        """Go on along the text; True when nothing is left to be seen."""
        draft, pair = self.draft, self.fit.pair
        rates = pair.rates.expected
        if draft.is_chain:
            return self._follow_chain(tokens, rates)
        while (place := draft.committed_len + self.level) < len(tokens):
            children = [node for node, parent in enumerate(draft.parents) if parent == self.node]
            if not children:
                return self._end()
            found = next((r for r, node in enumerate(children) if draft.tokens[node] == tokens[place]), None)
            pair.judged(self.level, len(children), found)
            self.expected += rates[min(self.level, len(rates) - 1)]
            if found is None:
                return self._end()
            self.node, self.level = children[found], self.level + 1
        return False

    def _follow_chain(self, tokens: list[int], rates: Sequence[float]) -> bool:
        """The same, where no node has siblings: nearly always."""
        guesses, start, first = self.draft.tokens, self.level, self.draft.committed_len
        level, last, grown = start, len(rates) - 1, len(tokens) - first
        end = min(len(guesses), grown)
        while level < end and guesses[level] == tokens[first + level]:
            level += 1
        is_stopped = level < end
        pair = self.fit.pair
        pair.counts.judged_run(start, level - start, is_stopped)
        if level + is_stopped <= last + 1:
            self.expected += sum(rates[start : level + is_stopped])
        else:
            self.expected += sum([rates[min(judged, last)] for judged in range(start, level + is_stopped)])
        self.level = level
        # What comes behind a draft's end is not seen before the text has grown beyond it.
        return self._end() if is_stopped or level == len(guesses) < grown else False

    def judge(self, verdict: Verdict) -> None:
        """What a rule has said about it, where acceptance is not a matter of equal tokens."""
        pair, rates = self.fit.pair, self.fit.pair.rates.expected
        reached = min(len(verdict.path) + 1, verdict.draft.depth)
        for level in range(reached):
            pair.judged(level, 1, 0 if level < len(verdict.path) else None)
            self.expected += rates[min(level, len(rates) - 1)]
        self.level = len(verdict.path)
        self._end()

    def _end(self) -> bool:
        self.fit.finished(self.level, self.expected)
        return True
