"""Drafts are compared with the text that came, whether or not they were verified."""

import math
from dataclasses import dataclass

from foreword.control.acceptance import PairEstimate
from foreword.control.rates import LEAST_SHIFT, MOST_SHIFT, SHIFT_STEP
from foreword.control.settings import ControlSettings
from foreword.speculation.confidence import class_of
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.verdict import Verdict

_S = ControlSettings()


@dataclass(slots=True)
class RequestFit:
    """The acceptance ratio of one request: accepted over expected tokens, compared with its cohort."""

    pair: PairEstimate
    shift: int = 0  # logarithm of the ratio, in steps
    _accepted: float = 0.0
    _expected: float = 0.0

    def finished(self, accepted: int, expected: float) -> None:
        """One more draft was judged to its end."""
        self._accepted = _S.request_memory * self._accepted + accepted
        self._expected = _S.request_memory * self._expected + expected
        own = _S.request_drafts * self.pair.rates.expected[0]
        ratio = math.log((self._accepted + own) / (self._expected + own)) if own else 0.0
        self.shift = min(max(round(ratio / SHIFT_STEP), LEAST_SHIFT), MOST_SHIFT)
        self.pair.finished(accepted, expected)


@dataclass(slots=True)
class Waiting:
    """A draft that is compared with the text as it comes, whether or not it was verified."""

    fit: RequestFit
    draft: Draft
    asked: int  # levels
    kept: int  # levels of it with a net benefit
    node: int = ROOT  # the deepest node that the text went through
    level: int = 0
    expected: float = 0.0

    def follow(self, tokens: list[int]) -> bool:
        """Go on along the text; return True when nothing is left to compare."""
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
        drafted, start, first = self.draft.tokens, self.level, self.draft.committed_len
        level, grown = start, len(tokens) - first
        end = min(len(drafted), grown)
        while level < end and drafted[level] == tokens[first + level]:
            level += 1
        is_stopped = level < end
        self._judge_run(start, level, is_stopped)
        self.level = level
        # Whether more would have been accepted shows when the text has grown beyond the draft.
        return self._end() if is_stopped or level == len(drafted) < grown else False

    def _judge_run(self, start: int, level: int, is_stopped: bool) -> None:
        """Count a chain's levels from `start` on, accepted up to `level`, which was rejected if it stopped there."""
        counts, kept = self.fit.pair.counts, self.kept
        sure = self.draft.confidence if self.draft.is_chain else ()
        self.expected += sum(self.fit.pair.rates.node_chances(self.draft)[start : level + is_stopped])
        # Levels without a net benefit count by their class alone.
        if start < kept:
            counts.judged_run(start, min(level, kept) - start, is_stopped and level < kept)
            if level >= kept:
                self._ended(kept)
        if sure:
            for place in range(start, level + is_stopped):
                counts.judged_sure(class_of(sure[place]), place < level)

    def _ended(self, level: int) -> None:
        if level < self.asked:
            self.fit.pair.counts.ended_at(level)

    def judge(self, verdict: Verdict) -> None:
        """Count a verdict, where acceptance is not a matter of equal tokens."""
        accepted, depth = len(verdict.path), verdict.draft.depth
        self._judge_run(0, accepted, is_stopped=accepted < depth)
        self.level = accepted
        self._end()

    def _end(self) -> bool:
        self.fit.finished(self.level, self.expected)
        return True
