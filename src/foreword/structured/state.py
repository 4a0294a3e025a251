"""Parser state of an answer in its grammar."""

from collections.abc import Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt

from foreword.structured.compiled import Bits, CompiledGrammar
from foreword.structured.masks import MaskBudget, MaskWorker, TenantBudgets

Path = tuple[int, ...]
"""Tokens after the committed ones."""

FORESEEN = 64
"""Maximum forced tokens computed at once, which is also the maximum size of a draft."""

_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
"""Parser states in which no token can follow although the answer is incomplete."""


class GrammarError(ValueError):
    """The grammar forbids a token, or became too complex to continue."""


class GrammarState:
    """Computes which tokens a grammar allows after an answer's committed tokens and after draft tokens.

    Only `commit` advances the state; draft tokens are parsed and rolled back. An end token is allowed where the answer
    is complete, and only end tokens may follow it. Fast masks are computed within the pass. After a slow mask drafting
    stops, and `worker` computes the next mask between passes. The answer joins no pass until that mask `is_ready`.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        budget: MaskBudget | None = None,
        worker: MaskWorker | None = None,
    ) -> None:
        """Without a worker, all masks are computed within the pass."""
        self._matcher = grammar.new_matcher()  # freed before the grammar, which returns the memory of both
        self._grammar = grammar
        self._budget = budget or MaskBudget(TenantBudgets())
        self._worker = worker
        self._committed: list[int] = []
        self._unread: list[int] = []  # committed tokens that the parser has not read
        self._has_ended = False
        self._ahead: Path = ()  # draft tokens that the parser has read and will roll back
        # Masks by path of draft tokens.
        self._known: dict[Path, Bits] = {} if grammar.first_mask is None else {(): grammar.first_mask}
        self._lock = Lock()  # a timed-out drafter may still use it
        self._is_slow = grammar.is_slow and worker is not None
        self._fast_masks = 0  # consecutive
        self._calm_masks = self._budget.limits.calm_masks  # fast masks until it is no longer slow
        self.is_ready = True  # whether a pass may include it
        self.error: str | None = None  # why it could not continue

    @property
    def vocab_size(self) -> int:
        return self._grammar.tokens.size

    @property
    def can_draft(self) -> bool:
        """Return whether masks of draft tokens can be computed in a pass.

        Only committed tokens increase the answer's mask budget, so masks of rejected ones must not use it up.
        """
        return not self._is_slow and not self._budget.has_excess

    @property
    def used(self) -> float:
        return self._budget.used

    def commit(self, tokens: Sequence[int]) -> None:
        """Add committed tokens; raise `GrammarError` and change nothing if they are forbidden."""
        with self._lock:
            own = self._before_end(tokens)
            if self._is_slow and self._are_allowed(own):
                self._unread += own
            elif (self._has_ended and own) or not self._catch_up() or not self._read((), own):
                why = self._error_text()
                self._restart()
                raise GrammarError(why)
            self._ahead = ()
            self._committed += own
            self._has_ended |= len(own) < len(tokens)
            self._budget.earn(len(tokens))
            came = tuple(tokens)
            known = self._known.items()
            self._known = {path[len(came) :]: mask for path, mask in known if path[: len(came)] == came}
            if self._is_slow and () not in self._known and self._worker is not None:
                self.is_ready = False
                self._worker.put(self)

    def prepare(self) -> None:
        """Compute the next mask, in the worker's thread."""
        with self._lock:
            try:
                self._mask(())
                self._take_back()
            finally:
                self.is_ready = True

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Bits:
        """Return the masks after the text and after each draft node, [1 + nodes, words]; parent -1 is the text.

        After a forbidden node everything is allowed, because it is never accepted. After an error nothing is allowed.
        """
        rows = np.empty((1 + len(tokens), self._grammar.words), np.int32)
        self._fill(rows, [(), *paths(tokens, parents)])
        return rows

    def masks_after(self, ahead: Sequence[Path]) -> Bits:
        rows = np.empty((len(ahead), self._grammar.words), np.int32)
        self._fill(rows, ahead)
        return rows

    def follows(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Return for each node whether it and its ancestors are allowed; False if a slow mask would be needed."""
        with self._lock:
            try:
                return [
                    (not self._is_slow or path[:-1] in self._known) and self._is_allowed(path)
                    for path in paths(tokens, parents)
                ]
            finally:
                self._take_back()

    def forced(self, most: int) -> list[int]:
        """Return up to `most` next tokens, as far as the grammar allows only one token at a time."""
        with self._lock:
            if self._has_ended or most < 1 or not self._catch_up():
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
        mask, began = np.empty(grammar.words, np.int32), self._budget.clock()
        is_read = self._catch_up() and self._read(self._ahead, path)
        if is_read:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        why = self._spent(self._budget.clock() - began)
        if why is not None or not is_read or self._matcher.is_error():
            self._give_up(why)
            return grammar.nothing
        if grammar.allows_one(mask):
            self._foresee(path)
        return grammar.with_all_ends(mask)

    def _spent(self, seconds: float) -> str | None:
        """Account for a mask; return why the answer must end, or None."""
        if seconds > self._budget.limits.slow_mask:
            if not self._is_slow and self._fast_masks:
                self._calm_masks *= 2  # it was fast before
            self._fast_masks, self._grammar.is_slow = 0, True
            self._is_slow = self._worker is not None
        else:
            self._fast_masks += 1
            self._is_slow = self._is_slow and self._fast_masks < self._calm_masks
        return self._budget.spend(seconds)

    def _foresee(self, path: Path) -> Path:
        """Return the tokens that the grammar forces after the parser's position, and store their masks."""
        forced = tuple(map(int, self._matcher.compute_ff_tokens()[:FORESEEN]))  # may be unlimited
        for place, token in enumerate(forced):
            self._known.setdefault((*path, *forced[:place]), self._grammar.only(token))
        return forced

    def _is_allowed(self, path: Path) -> bool:
        """Return whether all tokens of a path are allowed in turn after the text."""
        before, token = self._mask(path[:-1]), path[-1]
        is_reached = before is not self._grammar.everything
        return is_reached and 0 <= token < self.vocab_size and bool(before[token >> 5] >> (token & 31) & 1)

    def _are_allowed(self, tokens: Sequence[int]) -> bool:
        """Return whether known masks allow these next tokens."""
        ahead = [tuple(tokens[: place + 1]) for place in range(len(tokens))]
        return not self._has_ended and all(
            path[:-1] in self._known and self._is_allowed(path) for path in ahead
        )

    def _catch_up(self) -> bool:
        """Feed the parser the committed tokens that it has not read."""
        unread, self._unread = self._unread, []
        if not unread:
            return True
        self._take_back()
        return bool(self._matcher.try_consume_tokens(unread) == len(unread) and not self._matcher.is_error())

    def _read(self, ahead: Path, path: Sequence[int]) -> bool:
        """Feed the parser `path` after `ahead`, rolling back what differs."""
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
        """Record why the parser cannot continue; the text is unchanged."""
        self.error = why or self._error_text()
        self._restart()

    def _error_text(self) -> str:
        lines = self._matcher.get_error().strip().splitlines() if self._matcher.is_error() else []
        if lines and lines[0] in _DEAD_ENDS:
            return "no text fits it"
        return lines[0] if lines else "the grammar does not allow these tokens here"

    def _restart(self) -> None:
        self._matcher = self._grammar.new_matcher()
        self._ahead, self._unread = (), list(self._committed)

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before the first end token."""
        ends = self._grammar.ends
        place = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        return list(tokens[:place])


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """Return for each node the tokens from the first level to it."""
    found: list[Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def unpacked(bits: Bits, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return the bits as booleans, [rows, vocab]."""
    flat = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")
    return flat[:, :vocab_size].view(np.bool_)
