"""Compares drafts with the text that follows, whether or not they were verified."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreword.control.acceptance import Estimate
from foreword.control.rates import LEAST_SHIFT, MOST_SHIFT, SHIFT_STEP
from foreword.control.settings import DEFAULTS
from foreword.speculation.confidence import class_of
from foreword.speculation.draft import ROOT, Draft

MEMORY = 0.94
"""Decay factor per draft of a request's own statistics: about 16 drafts count."""


@dataclass(slots=True)
class RequestFit:
    """A request's acceptance ratio: accepted / expected tokens, relative to its cohort."""

    estimate: Estimate
    shift: int = 0  # log of the ratio, in steps of SHIFT_STEP
    _accepted: float = 0.0
    _expected: float = 0.0

    def finished(self, accepted: int, expected: float) -> None:
        """Count one judged draft."""
        self._accepted = MEMORY * self._accepted + accepted
        self._expected = MEMORY * self._expected + expected
        own = DEFAULTS.request_drafts * self.estimate.rates.expected[0]
        ratio = math.log((self._accepted + own) / (self._expected + own)) if own else 0.0
        self.shift = min(max(round(ratio / SHIFT_STEP), LEAST_SHIFT), MOST_SHIFT)
        self.estimate.finished(accepted, expected)


@dataclass(slots=True)
class Comparison:
    """A draft being compared with the text as it is committed."""

    fit: RequestFit
    draft: Draft
    requested: int  # requested levels
    kept: int  # levels with a net benefit; deeper ones count only by confidence
    node: int = ROOT  # deepest node on the text's path
    level: int = 0
    expected: float = 0.0

    def follow(self, tokens: Sequence[int]) -> bool:
        """Follow new tokens; return True when nothing is left to compare."""
        draft = self.draft
        drafted, fresh = draft.tokens, tokens[draft.committed_len + self.level :]
        if draft.is_chain:
            right, left = 0, len(drafted) - self.level
            for own, token in zip(drafted[self.level :], fresh, strict=False):
                if own != token:
                    break
                right += 1
            is_wrong = right < min(left, len(fresh))
            self._count_chain(right, is_wrong)
            return self.finish() if is_wrong or right == left else False
        for token in fresh:
            children = [node for node, parent in enumerate(draft.parents) if parent == self.node]
            siblings = [drafted[node] for node in children]
            found = siblings.index(token) if token in siblings else None
            if children:
                self._count_siblings(len(children), found)
            elif self.level < self.kept:
                self._ended()
            if found is None:
                return self.finish()
            self.node = children[found]
        return False

    def judge(self, accepted: int, depth: int) -> None:
        """Count a verdict of a rule under which acceptance is not equality of tokens."""
        self._count_chain(accepted, accepted < depth)
        self.finish()

    def finish(self) -> bool:
        """Count the draft as judged up to the current text."""
        self.fit.finished(self.level, self.expected)
        return True

    def _count_chain(self, right: int, is_wrong: bool) -> None:
        """Count the next levels of a chain: `right` accepted ones, and one rejected if `is_wrong`."""
        estimate, first, confidence = self.fit.estimate, self.level, self.draft.confidence
        last = first + right
        estimate.counts.judged_chain(first, min(last, self.kept), is_wrong and last < self.kept)
        if confidence and self.draft.is_chain:
            classes = [class_of(one) for one in confidence[first : last + is_wrong]]
            estimate.counts.judged_sure(classes, right)
            sure = estimate.rates.sure
            self.expected += sum([sure[one] for one in classes])
        else:
            self._expect(first, last + is_wrong)
        self.level = last
        if first < self.kept <= last:
            self._ended()

    def _count_siblings(self, children: int, found: int | None) -> None:
        """Count the next level of a tree."""
        if self.level < self.kept:
            self.fit.estimate.counts.judged(self.level, children, found)
        self._expect(self.level, self.level + 1)
        if found is not None:
            self.level += 1
            if self.level == self.kept:
                self._ended()

    def _expect(self, first: int, end: int) -> None:
        expected = self.fit.estimate.rates.expected
        self.expected += sum(expected[first:end])
        if (beyond := end - max(first, len(expected))) > 0:
            self.expected += beyond * expected[-1]

    def _ended(self) -> None:
        """Count a draft that ended although all its levels with a net benefit were accepted."""
        level = min(self.level, self.kept)
        if level < self.requested:
            self.fit.estimate.counts.ended_at(level)
