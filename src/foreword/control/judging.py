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
        memory = DEFAULTS.request_memory
        self._accepted = memory * self._accepted + accepted
        self._expected = memory * self._expected + expected
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
        fresh = tokens[self.draft.committed_len + self.level :]
        if self.draft.is_chain:
            left, accepted = self.draft.tokens[self.level :], 0
            for own, token in zip(left, fresh, strict=False):
                if own != token:
                    break
                accepted += 1
            is_rejected = accepted < min(len(left), len(fresh))
            self._count_chain(accepted, is_rejected)
            return self.finish() if is_rejected or accepted == len(left) else False
        for token in fresh:
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
                    self._count_end(self.level)
                return self.finish()
        return False

    def judge(self, accepted: int, depth: int) -> None:
        """Count a verdict of a rule under which acceptance is not equality of tokens."""
        self._count_chain(accepted, accepted < depth)
        self.finish()

    def finish(self) -> bool:
        """Count the draft as judged up to the current text."""
        self.fit.finished(self.level, self.expected)
        return True

    def _children(self) -> Sequence[int]:
        return [node for node, parent in enumerate(self.draft.parents) if parent == self.node]

    def _count_chain(self, accepted: int, is_rejected: bool) -> None:
        """Count the next levels of a chain: the accepted ones, and one more if it was rejected."""
        estimate, first, draft, useful = self.fit.estimate, self.level, self.draft, self.useful
        last = self.level = first + accepted
        estimate.counts.count_chain(first, min(last, useful), is_rejected and last < useful)
        if draft.confidence and draft.is_chain:
            classes = [class_of(one) for one in draft.confidence[first : last + is_rejected]]
            estimate.counts.count_classes(classes, accepted)
            by_class = estimate.rates.by_class
            self.expected = sum([by_class[one] for one in classes], self.expected)
        else:
            self._expect(last + is_rejected - first, first)
        if first < useful <= last:
            self._count_end(useful)

    def _count(self, children: int, found: int | None) -> None:
        """Count the next level of a tree: its nodes, and the rank of the accepted one (None: all were rejected)."""
        if self.level < self.useful:
            self.fit.estimate.counts.count_level(self.level, children, found)
        self._expect(1, self.level)
        if found is not None:
            self.level += 1
            if self.level == self.useful:
                self._count_end(self.level)

    def _expect(self, levels: int, first: int) -> None:
        """Add the expected tokens of these levels; unknown levels are like the last known one."""
        known = self.fit.estimate.rates.expected
        self.expected = sum(known[first : first + levels], self.expected)
        if (beyond := first + levels - max(first, len(known))) > 0:
            self.expected += beyond * known[-1]

    def _count_end(self, level: int) -> None:
        """Count a draft of which all useful levels were accepted, though more were requested."""
        if level < self.requested:
            self.fit.estimate.counts.count_end(level)
