"""Limits the reasoning at the start of an answer, and applies the grammar after it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from foreword.structured.compiled import Bits
from foreword.structured.state import GrammarError, GrammarState, Path, paths


@dataclass(frozen=True)
class ThinkingTags:
    """The tags around reasoning, for one vocabulary."""

    begin: bytes
    end: bytes
    begin_ids: Path  # the tags as token ids
    end_ids: Path
    piece: Callable[[int], bytes]  # returns the bytes of a token, or the name of a control token
    vocab_size: int
    stop_ids: tuple[int, ...] = ()  # tokens that end an answer


class _Phase(Enum):
    START = 0  # nothing but white space or part of the begin tag was generated
    THINKING = 1
    DONE = 2  # after the reasoning, or without any


@dataclass(frozen=True)
class _Progress:
    """Progress of an answer through its reasoning."""

    phase: _Phase
    left: int | None  # remaining reasoning tokens; None: unlimited
    tag_bytes: bytes = b""  # newest text, which may be part of a tag
    forced: int = 0  # number of end tag tokens generated since the budget is used up
    unread: Path = ()  # tokens of the structured part that `GrammarState` has not read


class ThinkingState:
    """Computes which tokens are allowed in an answer that may start with reasoning.

    It has the interface of `GrammarState`. During reasoning every token is allowed. Once the budget is used up, only
    the end tag is allowed. After it the grammar applies, if there is one.
    """

    def __init__(
        self, tags: ThinkingTags, budget: int | None, is_open: bool, grammar: GrammarState | None = None
    ) -> None:
        """`is_open`: the prompt already contains the begin tag; otherwise the answer may start with it."""
        self._tags = tags
        self._grammar = grammar
        start = _Progress(_Phase.THINKING if is_open else _Phase.START, budget)
        self._progress: dict[Path, _Progress] = {(): start}  # by path of draft tokens
        words = -(-tags.vocab_size // 32)
        self._everything: Bits = np.full(words, -1, np.int32)
        self._while_thinking = self._everything
        if grammar is not None:  # the answer must not end before its structured part
            self._while_thinking = ~self._only(*tags.stop_ids)

    @property
    def vocab_size(self) -> int:
        return self._tags.vocab_size

    @property
    def is_ready(self) -> bool:
        return self._grammar is None or self._grammar.is_ready

    @property
    def can_draft(self) -> bool:
        return self._grammar is None or self._grammar.can_draft

    @property
    def error(self) -> str | None:
        return None if self._grammar is None else self._grammar.error

    def commit(self, tokens: Sequence[int]) -> None:
        """Add committed tokens; raise `GrammarError` and change nothing if they are forbidden."""
        committed = tuple(tokens)
        if self._progress_after(()).phase is not _Phase.DONE and not self._is_allowed(committed):
            raise GrammarError("these tokens are not allowed before the end of the reasoning")
        progress = self._progress_after(committed)
        if progress.phase is _Phase.DONE:
            if self._grammar is not None and progress.unread:
                self._grammar.commit(progress.unread)
            progress = replace(progress, unread=())
        self._progress = {(): progress}

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Bits:
        return self.masks_after([(), *paths(tokens, parents)])

    def masks_after(self, draft_paths: Sequence[Path]) -> Bits:
        return np.stack([self._mask(path) for path in draft_paths])

    def follows(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        return [self._is_allowed(path) for path in paths(tokens, parents)]

    def forced(self, most: int) -> list[int]:
        tag: Path = ()
        while len(tag) < most and self._must_end(progress := self._progress_after(tag)):
            tag = (*tag, self._tags.end_ids[progress.forced])
        if tag or self._grammar is None or self._progress_after(()).phase is not _Phase.DONE:
            return list(tag)
        return self._grammar.forced(most)

    def _must_end(self, progress: _Progress) -> bool:
        """Return whether the budget is used up, so that only the end tag is allowed."""
        return progress.phase is _Phase.THINKING and progress.left == 0

    def _mask(self, path: Path) -> Bits:
        progress = self._progress_after(path)
        if self._must_end(progress):
            return self._only(self._tags.end_ids[progress.forced])
        if progress.phase is _Phase.THINKING:
            return self._while_thinking
        if self._grammar is None:
            return self._everything
        mask: Bits = self._grammar.masks_after([progress.unread])[0]
        if progress.phase is _Phase.DONE:
            return mask
        # The begin tag may follow, or the structured part without reasoning.
        unread, tag = progress.unread, self._tags.begin_ids
        is_tag_possible = tag[: len(unread)] == unread
        tag_mask = self._only(*tag[len(unread) : len(unread) + 1]) if is_tag_possible else self._only()
        is_structured = not unread or self._grammar.follows(unread, range(-1, len(unread) - 1))[-1]
        return np.bitwise_or(mask, tag_mask) if is_structured else tag_mask

    def _is_allowed(self, path: Path) -> bool:
        """Return whether each token is allowed after those before it."""
        return all(
            0 <= token < self.vocab_size and self._mask(path[:index])[token >> 5] >> (token & 31) & 1
            for index, token in enumerate(path)
        )

    def _only(self, *tokens: int) -> Bits:
        """Return the mask that allows only these tokens."""
        bits = np.zeros(len(self._everything) * 32, np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _progress_after(self, path: Path) -> _Progress:
        """Return the progress after a path of draft tokens, computed from its longest computed prefix."""
        computed = self._progress  # read once, since `commit` may replace it while another thread drafts
        start = next(size for size in range(len(path), -1, -1) if path[:size] in computed)
        progress = computed[path[:start]]
        for size in range(start, len(path)):
            progress = computed[path[: size + 1]] = self._next(progress, path[size])
        return progress

    def _next(self, progress: _Progress, token: int) -> _Progress:
        """Return the progress after one more token."""
        if progress.phase is _Phase.DONE:
            return replace(progress, unread=(*progress.unread, token))
        if self._must_end(progress):
            is_last = progress.forced + 1 == len(self._tags.end_ids)
            return _Progress(_Phase.DONE, 0) if is_last else replace(progress, forced=progress.forced + 1)
        if progress.phase is _Phase.THINKING:
            return self._thinking(progress, token)
        tag_bytes, unread = progress.tag_bytes + self._tags.piece(token), (*progress.unread, token)
        written = tag_bytes.lstrip()
        if written.startswith(self._tags.begin):
            return _Progress(_Phase.THINKING, progress.left)
        if self._tags.begin.startswith(written):
            return replace(progress, tag_bytes=tag_bytes, unread=unread)
        return _Progress(_Phase.DONE, progress.left, unread=unread)

    def _thinking(self, progress: _Progress, token: int) -> _Progress:
        """Return the progress after one more token of reasoning."""
        tag_bytes = progress.tag_bytes + self._tags.piece(token)
        if self._tags.end in tag_bytes:
            return _Progress(_Phase.DONE, progress.left)
        left = None if progress.left is None else progress.left - 1
        size = min(len(self._tags.end) - 1, len(tag_bytes))  # the longest beginning of an end tag
        return _Progress(_Phase.THINKING, left, tag_bytes[len(tag_bytes) - size :])


AnswerState = GrammarState | ThinkingState  # the state that determines which tokens may follow in an answer
