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
        draft, drafted, parents = self.draft, self.draft.tokens, self.draft.parents
        for token in tokens[draft.committed_len + self.level :]:
            if draft.is_chain:
                children = [self.level] if self.level < len(parents) else []
            else:
                children = [node for node, parent in enumerate(parents) if parent == self.node]
            if not children:
                if self.level < self.kept:
                    self._ended()
                return self.finish()
            siblings = [drafted[node] for node in children]
            found = siblings.index(token) if token in siblings else None
            self._count(len(children), found)
            if found is None:
                return self.finish()
            self.node = children[found]
        return False

    def judge(self, accepted: int, depth: int) -> None:
        """Count a verdict of a rule under which acceptance is not equality of tokens."""
        while self.level < accepted:
            self._count(1, 0)
        if accepted < depth:
            self._count(1, None)
        self.finish()

    def finish(self) -> bool:
        """Count the draft as judged up to the current text."""
        self.fit.finished(self.level, self.expected)
        return True

    def _count(self, children: int, found: int | None) -> None:
        estimate, level = self.fit.estimate, self.level
        counts, rates, confidence = estimate.counts, estimate.rates, self.draft.confidence
        if level < self.kept:
            counts.judged(level, children, found)
        if confidence and self.draft.is_chain:
            sure = class_of(confidence[level])
            counts.judged_sure(sure, found is not None)
            self.expected += rates.sure[sure]
        else:
            self.expected += rates.expected[min(level, len(rates.expected) - 1)]
        if found is not None:
            self.level += 1
            if self.level == self.kept:
                self._ended()

    def _ended(self) -> None:
        if self.level < self.requested:
            self.fit.estimate.counts.ended_at(self.level)
