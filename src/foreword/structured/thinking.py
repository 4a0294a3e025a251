"""Reasoning at the start of an answer: its token budget, and a grammar that applies after it."""

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
    begin_ids: Path
    end_ids: Path
    piece: Callable[[int], bytes]  # bytes that a token adds, including names of control tokens
    vocab_size: int
    stop_ids: tuple[int, ...] = ()  # tokens that end an answer


class _Phase(Enum):
    START = 0  # reasoning may begin
    THINKING = 1
    DONE = 2


@dataclass(frozen=True)
class _Progress:
    """Position of an answer relative to its reasoning."""

    phase: _Phase
    left: int | None  # remaining reasoning tokens; None: unlimited
    seen: bytes = b""  # text that may be part of a tag
    forced: int = 0  # forced tokens of the end tag
    own: Path = ()  # grammar tokens that the grammar has not read


class ThinkingState:
    """Allowed tokens of an answer that may start with reasoning; same interface as `GrammarState`, which it
    may contain. During reasoning everything is allowed. Once the budget is used up, only the end tag is.
    After it the grammar applies, if there is one."""

    def __init__(
        self, tags: ThinkingTags, budget: int | None, is_open: bool, grammar: GrammarState | None = None
    ) -> None:
        """`is_open`: the prompt already contains the opening tag; otherwise the answer may start with it."""
        self._tags = tags
        self._grammar = grammar
        start = _Progress(_Phase.THINKING if is_open else _Phase.START, budget)
        self._places: dict[Path, _Progress] = {(): start}  # by path of draft tokens
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
        came = tuple(tokens)
        if self._place(()).phase is not _Phase.DONE and not self._is_allowed(came):
            raise GrammarError("the end of the reasoning does not allow these tokens here")
        place = self._place(came)
        if place.phase is _Phase.DONE:
            if self._grammar is not None and place.own:
                self._grammar.commit(place.own)
            place = replace(place, own=())
        self._places = {(): place}

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Bits:
        return self.masks_after([(), *paths(tokens, parents)])

    def masks_after(self, ahead: Sequence[Path]) -> Bits:
        return np.stack([self._mask(path) for path in ahead])

    def follows(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        return [self._is_allowed(path) for path in paths(tokens, parents)]

    def forced(self, most: int) -> list[int]:
        found: Path = ()
        while len(found) < most and self._must_end(place := self._place(found)):
            found = (*found, self._tags.end_ids[place.forced])
        if found or self._grammar is None or self._place(()).phase is not _Phase.DONE:
            return list(found)
        return self._grammar.forced(most)

    def _must_end(self, place: _Progress) -> bool:
        return place.phase is _Phase.THINKING and place.left == 0

    def _mask(self, path: Path) -> Bits:
        place = self._place(path)
        if self._must_end(place):
            return self._only(self._tags.end_ids[place.forced])
        if place.phase is _Phase.THINKING:
            return self._while_thinking
        if self._grammar is None:
            return self._everything
        mask: Bits = self._grammar.masks_after([place.own])[0]
        if place.phase is _Phase.DONE:
            return mask
        own, tag = place.own, self._tags.begin_ids
        more = self._only(*tag[len(own) : len(own) + 1]) if tag[: len(own)] == own else self._only()
        is_text = not own or self._grammar.follows(own, range(-1, len(own) - 1))[-1]
        return np.bitwise_or(mask, more) if is_text else more

    def _is_allowed(self, path: Path) -> bool:
        """Return whether each token is allowed after those before it."""
        return all(self._allows(self._mask(path[:place]), token) for place, token in enumerate(path))

    def _allows(self, mask: Bits, token: int) -> bool:
        return 0 <= token < self.vocab_size and bool(mask[token >> 5] >> (token & 31) & 1)

    def _only(self, *tokens: int) -> Bits:
        bits = np.zeros(len(self._everything) * 32, np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _place(self, path: Path) -> _Progress:
        known = self._places  # a timed-out drafter may still use the last step's
        start = next(size for size in range(len(path), -1, -1) if path[:size] in known)
        place = known[path[:start]]
        for size in range(start, len(path)):
            place = known[path[: size + 1]] = self._after(place, path[size])
        return place

    def _after(self, place: _Progress, token: int) -> _Progress:
        if place.phase is _Phase.DONE:
            return replace(place, own=(*place.own, token))
        if self._must_end(place):
            is_last = place.forced + 1 == len(self._tags.end_ids)
            return _Progress(_Phase.DONE, 0) if is_last else replace(place, forced=place.forced + 1)
        if place.phase is _Phase.THINKING:
            return self._thinking(place, token)
        seen, own = place.seen + self._tags.piece(token), (*place.own, token)
        written = seen.lstrip()
        if written.startswith(self._tags.begin):
            return _Progress(_Phase.THINKING, place.left)
        if self._tags.begin.startswith(written):
            return replace(place, seen=seen, own=own)
        return _Progress(_Phase.DONE, place.left, own=own)

    def _thinking(self, place: _Progress, token: int) -> _Progress:
        seen = place.seen + self._tags.piece(token)
        if self._tags.end in seen:
            return _Progress(_Phase.DONE, place.left)
        left = None if place.left is None else place.left - 1
        kept = len(self._tags.end) - 1
        return _Progress(_Phase.THINKING, left, seen[len(seen) - min(kept, len(seen)) :])


AnswerState = GrammarState | ThinkingState
"""Determines which tokens may follow an answer."""
