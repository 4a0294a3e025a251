"""Where an answer stands in its grammar."""

from collections.abc import Sequence
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from foreword.structured.compiler import CompiledGrammar

Bits = npt.NDArray[np.int32]
"""[..., words], a bit for every token of the vocabulary, 32 in a word."""

Path = tuple[int, ...]
"""Tokens after the committed ones."""


MASK_SECONDS = 0.1
"""Of a processor's time: an answer whose form takes longer to look up at some token is given up, as others wait."""

FORESEEN = 64
"""Tokens without a choice that are looked up at once: a draft has no more."""

TOO_SLOW = f"what may come next takes longer than {MASK_SECONDS:g} s to work out"


_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
"""The parser's words for that nothing can follow, and the answer is not complete."""


class GrammarError(ValueError):
    """A token that the grammar does not allow, or a grammar that has become too complex to go on with."""


class GrammarState:
    """What a grammar allows after the committed tokens of an answer, and after any guesses behind them.

    Only `commit` moves it. To look ahead, the parser reads guesses and takes them back before anybody else is served.
    An end token is allowed where the answer is complete; behind one, nothing but another.
    """

    def __init__(self, grammar: "CompiledGrammar") -> None:
        self._grammar = grammar
        self._matcher = grammar.new_matcher()
        self._committed: list[int] = []
        self._has_ended = False
        self._ahead: Path = ()  # what the parser has read and takes back
        self._known: dict[Path, Bits] = {}  # masks, by what stands before them behind the committed tokens
        self._lock = Lock()  # a drafter that was left behind may still ask
        self.error: str | None = None  # why it could not go on somewhere

    @property
    def vocab_size(self) -> int:
        return self._grammar.tokens.size

    def commit(self, tokens: Sequence[int]) -> None:
        """These came next. Raises `GrammarError`, and nothing has changed, if they could not have."""
        with self._lock:
            own = self._before_end(tokens)
            if (self._has_ended and own) or not self._read((), own):
                why = self._complaint()
                self._start_again()
                raise GrammarError(why)
            self._ahead = ()
            self._committed += own
            self._has_ended |= len(own) < len(tokens)
            came = tuple(tokens)
            known = self._known.items()
            self._known = {path[len(came) :]: mask for path, mask in known if path[: len(came)] == came}

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Bits:
        """[1 + nodes, words], what may follow the text, then each node of a draft (-1 is the text's parent).

        After a node that cannot come itself everything is allowed: nobody gets there. Where the parser gave up,
        nothing is.
        """
        rows = np.empty((1 + len(tokens), self._grammar.words), np.int32)
        self._fill(rows, [(), *paths(tokens, parents)])
        return rows

    def masks_after(self, ahead: Sequence[Path]) -> Bits:
        """[paths, words], what may follow each of these."""
        rows = np.empty((len(ahead), self._grammar.words), np.int32)
        self._fill(rows, ahead)
        return rows

    def follows(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """[nodes], whether a node of a draft and all above it are allowed."""
        with self._lock:
            try:
                return [self._is_allowed(path) for path in paths(tokens, parents)]
            finally:
                self._take_back()

    def forced(self, most: int) -> list[int]:
        """The next tokens, as far as there is no choice; at most so many."""
        with self._lock:
            if self._has_ended or most < 1:
                return []
            found = self._foresee(())[:most]
            try:
                if len(found) < most and self._read((), found) and self._matcher.is_stopped():
                    found = (*found, self._grammar.tokens.end_ids[0])
            finally:
                self._take_back()
            return list(found)

    def _fill(self, rows: Bits, ahead: Sequence[Path]) -> None:
        with self._lock:
            try:
                for row, path in zip(rows, ahead, strict=True):
                    row[:] = self._mask(path)
            finally:
                self._take_back()

    def _mask(self, path: Path) -> Bits:
        known = self._known.get(path)
        if known is None:
            known = self._known[path] = self._new_mask(path)
        return known

    def _new_mask(self, path: Path) -> Bits:
        grammar = self._grammar
        if path and not self._is_allowed(path):
            return grammar.everything
        if self._has_ended or (path and path[-1] in grammar.ends):
            return grammar.only_ends
        if not self._read(self._ahead, path):
            self._give_up()
            return grammar.nothing
        mask, began = np.empty(grammar.words, np.int32), thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        is_slow = thread_time() - began > MASK_SECONDS
        if self._matcher.is_error() or is_slow:
            self._give_up(TOO_SLOW if is_slow else None)
            return grammar.nothing
        if grammar.allows_one(mask):
            self._foresee(path)
        return grammar.with_all_ends(mask)

    def _foresee(self, path: Path) -> Path:
        """The tokens that must come behind what the parser has read: where there is no choice, masks need no work."""
        forced = tuple(
            map(int, self._matcher.compute_ff_tokens()[:FORESEEN])
        )  # a grammar may force tokens for ever
        for place, token in enumerate(forced):
            self._known.setdefault((*path, *forced[:place]), self._grammar.only(token))
        return forced

    def _is_allowed(self, path: Path) -> bool:
        """Whether the last of these may come behind the others, and they behind the text."""
        before, token = self._mask(path[:-1]), path[-1]
        is_reached = before is not self._grammar.everything
        return is_reached and 0 <= token < self.vocab_size and bool(before[token >> 5] >> (token & 31) & 1)

    def _read(self, ahead: Path, path: Sequence[int]) -> bool:
        """Have the parser read this behind the committed tokens; what it had read ahead otherwise it forgets."""
        common = 0
        while common < min(len(ahead), len(path)) and ahead[common] == path[common]:
            common += 1
        if len(ahead) > common:
            self._matcher.rollback(len(ahead) - common)
        more = list(path[common:])
        done = self._matcher.try_consume_tokens(more) if more else 0
        self._ahead = tuple(path[: common + done])
        return done == len(more) and not self._matcher.is_error()

    def _take_back(self) -> None:
        self._read(self._ahead, ())

    def _give_up(self, why: str | None = None) -> None:
        """What lies behind this cannot be told; the text itself is as it was."""
        self.error = why or self._complaint()
        self._start_again()

    def _complaint(self) -> str:
        lines = self._matcher.get_error().strip().splitlines() if self._matcher.is_error() else []
        if lines and lines[0] in _DEAD_ENDS:
            return "no text fits it"
        return lines[0] if lines else "the grammar does not allow these tokens here"

    def _start_again(self) -> None:
        """A parser that has failed never recovers: a new one reads the text."""
        self._matcher = self._grammar.new_matcher()
        self._ahead = ()
        self._matcher.try_consume_tokens(self._committed)

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first that ends the answer."""
        ends = self._grammar.ends
        place = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        return list(tokens[:place])


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """[nodes], the tokens from the first level down to each node."""
    found: list[Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def unpacked(bits: Bits, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[rows, vocab]"""
    flat = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")
    return flat[:, :vocab_size].view(np.bool_)
