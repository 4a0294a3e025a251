"""Compares drafts with the text that follows, whether or not they were verified."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreword.control.acceptance import Estimate
from foreword.control.rates import LEAST_SHIFT, MOST_SHIFT, SHIFT_STEP
from foreword.control.settings import DEFAULTS
from foreword.speculation.confidence import class_of
from foreword.speculation.draft import ROOT, Draft


@dataclass(slots=True)
class RequestFit:
    """A request's acceptance ratio: accepted / expected tokens, relative to its cohort."""

    estimate: Estimate
    shift: int = 0  # log of the ratio, in steps of SHIFT_STEP
    _accepted: float = 0.0
    _expected: float = 0.0

    def finished(self, accepted: int, expected: float) -> None:
        """Count one judged draft."""
        self._accepted = DEFAULTS.request_memory * self._accepted + accepted
        self._expected = DEFAULTS.request_memory * self._expected + expected
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
    useful: int  # levels whose verification has an expected gain; deeper ones count only by confidence
    node: int = ROOT  # deepest node on the text's path
    level: int = 0
    expected: float = 0.0

    def follow(self, tokens: Sequence[int]) -> bool:
        """Follow new tokens; return True when nothing is left to compare."""
        for token in tokens[self.draft.committed_len + self.level :]:
            children = self._children()
            found = next(
                (rank for rank, node in enumerate(children) if self.draft.tokens[node] == token), None
            )
            self._count(len(children), found)
            if found is None:
                return self.finish()
            self.node = children[found]
            if not self._children():
                if self.level < self.useful:
                    self._count_end()
                return self.finish()
        return False

    def judge(self, accepted: int, depth: int) -> None:
        """Count a verdict of a rule under which acceptance is not equality of tokens."""
        for _ in range(accepted):
            self._count(1, 0)
        if accepted < depth:
            self._count(1, None)
        self.finish()

    def finish(self) -> bool:
        """Count the draft as judged up to the current text."""
        self.fit.finished(self.level, self.expected)
        return True

    def _children(self) -> Sequence[int]:
        draft = self.draft
        if draft.is_chain:
            return (self.level,) if self.level < len(draft.tokens) else ()
        return [node for node, parent in enumerate(draft.parents) if parent == self.node]

    def _count(self, children: int, found: int | None) -> None:
        """Count the next level: its nodes, and the rank of the accepted one (None: all were rejected)."""
        estimate, level, draft = self.fit.estimate, self.level, self.draft
        rates = estimate.rates
        if level < self.useful:
            estimate.counts.count_level(level, children, found)
        if draft.confidence and draft.is_chain:
            confidence_class = class_of(draft.confidence[level])
            estimate.counts.count_class(confidence_class, found is not None)
            self.expected += rates.by_class[confidence_class]
        else:
            self.expected += rates.expected[min(level, len(rates.expected) - 1)]
        if found is not None:
            self.level += 1
            if self.level == self.useful:
                self._count_end()

    def _count_end(self) -> None:
        """Count a draft of which all useful levels were accepted, though more were requested."""
        if self.level < self.requested:
            self.fit.estimate.counts.count_end(self.level)
