"""Tracks the parser state of an answer in its grammar."""

from collections.abc import Sequence
from itertools import takewhile
from threading import Lock

import numpy as np
import numpy.typing as npt

from foreword.structured.compiled import Bits, CompiledGrammar
from foreword.structured.masks import MaskBudget, MaskWorker, TenantBudgets

Path = tuple[int, ...]  # draft tokens after the committed ones, in order
MAX_FORCED = 64  # maximum forced tokens computed at once, which is also the maximum size of a draft

_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
"""Parser states in which no token can follow although the answer is incomplete."""


class GrammarError(ValueError):
    """The grammar forbids a token, or became too complex to continue."""


class GrammarState:
    """Computes which tokens a grammar allows after an answer's committed tokens and after draft tokens.

    Only `commit` advances the state; draft tokens are parsed and rolled back. An end token is allowed where the answer
    is complete, and only end tokens may follow it. Fast masks are computed within the pass. After a slow mask drafting
    stops, and `worker` computes the next mask between passes. The answer joins no pass until `is_ready`.
    """

    def __init__(
        self, grammar: CompiledGrammar, budget: MaskBudget | None = None, worker: MaskWorker | None = None
    ) -> None:
        """Create the state at the start of an answer. Without a worker, all masks are computed within the pass."""
        self._matcher = grammar.new_matcher()  # freed before the grammar, which returns the memory of both
        self._grammar = grammar
        self._budget = budget or MaskBudget(TenantBudgets())
        self._worker = worker
        self._committed: list[int] = []
        self._unread: list[int] = []  # committed tokens that the parser has not read
        self._has_ended = False
        self._ahead: Path = ()  # draft tokens that the parser has read and will roll back
        # Computed masks, by path of draft tokens.
        self._masks: dict[Path, Bits] = {} if grammar.first_mask is None else {(): grammar.first_mask}
        self._lock = Lock()  # a timed-out drafter may still use it
        self._is_slow = grammar.is_slow and worker is not None
        self._fast_masks = 0  # consecutive
        self._calm_masks = self._budget.limits.calm_masks  # fast masks until the state is no longer slow
        self.is_ready = True  # whether a pass may include the answer
        self.error: str | None = None  # why the parser could not continue

    @property
    def vocab_size(self) -> int:
        return self._grammar.tokens.size

    @property
    def can_draft(self) -> bool:
        """Return whether a pass may compute masks of draft tokens: rejected ones must not use up the mask budget."""
        return not self._is_slow and not self._budget.has_excess

    @property
    def used(self) -> float:
        """Return the CPU seconds that the answer's masks have taken."""
        return self._budget.used

    def commit(self, tokens: Sequence[int]) -> None:
        """Add committed tokens; raise `GrammarError` and change nothing if they are forbidden."""
        with self._lock:
            text = self._before_end(tokens)
            if self._is_slow and self._are_allowed(text):
                self._unread += text
            elif (self._has_ended and text) or not self._catch_up() or not self._read((), text):
                why = self._error_text()
                self._restart()
                raise GrammarError(why)
            self._ahead = ()
            self._committed += text
            self._has_ended |= len(text) < len(tokens)
            self._budget.earn(len(tokens))
            committed, masks = tuple(tokens), self._masks.items()
            self._masks = {
                path[len(committed) :]: mask for path, mask in masks if path[: len(committed)] == committed
            }
            if self._is_slow and () not in self._masks and self._worker is not None:
                self.is_ready = False
                self._worker.put(self)

    def prepare(self) -> None:
        """Compute the next mask, and set `is_ready`; called by the worker's thread."""
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
        return self.masks_after([(), *paths(tokens, parents)])

    def masks_after(self, draft_paths: Sequence[Path]) -> Bits:
        """Return the mask after each path of draft tokens, [paths, words]."""
        with self._lock:
            try:
                return np.stack([self._mask(path) for path in draft_paths])
            finally:
                self._take_back()

    def follows(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Return for each node whether it and its ancestors are allowed; False if a slow mask would be needed."""
        with self._lock:
            try:
                return [
                    (not self._is_slow or path[:-1] in self._masks) and self._is_allowed(path)
                    for path in paths(tokens, parents)
                ]
            finally:
                self._take_back()

    def forced(self, most: int) -> list[int]:
        """Return up to `most` next tokens, until the grammar allows more than one token."""
        with self._lock:
            if self._has_ended or most < 1 or not self._catch_up():
                return []
            tokens = self._foresee(())[:most]
            try:
                if len(tokens) < most and self._read((), tokens) and self._matcher.is_stopped():
                    tokens = (*tokens, self._grammar.tokens.end_ids[0])
            finally:
                self._take_back()
            return list(tokens)

    def _mask(self, path: Path) -> Bits:
        """Return the mask after a path, computed once."""
        mask = self._masks.get(path)
        if mask is None:
            mask = self._masks[path] = self._new_mask(path)
        return mask

    def _new_mask(self, path: Path) -> Bits:
        """Compute the mask after a path. If the parser cannot, record the error and return a mask of no tokens."""
        grammar = self._grammar
        if path and not self._is_allowed(path):
            return grammar.everything
        if self._has_ended or (path and path[-1] in grammar.end_ids):
            return grammar.only_ends
        mask, began = np.empty(grammar.words, np.int32), self._budget.clock()
        is_read = self._catch_up() and self._read(self._ahead, path)
        if is_read:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        why = self._spend(self._budget.clock() - began)
        if why is not None or not is_read or self._matcher.is_error():
            self._give_up(why)
            return grammar.nothing
        if grammar.allows_one(mask):
            self._foresee(path)
        return grammar.with_all_ends(mask)

    def _spend(self, seconds: float) -> str | None:
        """Count the cost of a mask, and update whether the answer is slow; return why it must end, or None."""
        if seconds > self._budget.limits.slow_mask:
            if not self._is_slow and self._fast_masks:
                self._calm_masks *= 2  # masks were fast for a while, so wait longer the next time
            self._fast_masks, self._grammar.is_slow = 0, True
            self._is_slow = self._worker is not None
        else:
            self._fast_masks += 1
            self._is_slow = self._is_slow and self._fast_masks < self._calm_masks
        return self._budget.spend(seconds)

    def _foresee(self, path: Path) -> Path:
        """Return the tokens that the grammar forces after the parser's position, and store their masks."""
        forced = tuple(map(int, self._matcher.compute_ff_tokens()[:MAX_FORCED]))  # the list may be very long
        for index, token in enumerate(forced):
            self._masks.setdefault((*path, *forced[:index]), self._grammar.only(token))
        return forced

    def _is_allowed(self, path: Path) -> bool:
        """Return whether all tokens of a path are allowed in turn after the text."""
        mask, token = self._mask(path[:-1]), path[-1]
        is_reached = mask is not self._grammar.everything  # the mask after a forbidden node
        return is_reached and 0 <= token < self.vocab_size and bool(mask[token >> 5] >> (token & 31) & 1)

    def _are_allowed(self, tokens: Sequence[int]) -> bool:
        """Return whether masks computed before allow these next tokens; False if one is missing."""
        prefixes = [tuple(tokens[: index + 1]) for index in range(len(tokens))]
        return not self._has_ended and all(
            path[:-1] in self._masks and self._is_allowed(path) for path in prefixes
        )

    def _catch_up(self) -> bool:
        """Let the parser read the committed tokens that it has not read; return whether it accepted them."""
        unread, self._unread = self._unread, []
        if not unread:
            return True
        self._take_back()
        return bool(self._matcher.try_consume_tokens(unread) == len(unread) and not self._matcher.is_error())

    def _read(self, current: Path, path: Sequence[int]) -> bool:
        """Move the parser from path `current` to `path` by rollback and reading; return whether it accepted all."""
        common = 0
        while common < min(len(current), len(path)) and current[common] == path[common]:
            common += 1
        if len(current) > common:
            self._matcher.rollback(len(current) - common)
        new_tokens = list(path[common:])
        accepted = self._matcher.try_consume_tokens(new_tokens) if new_tokens else 0
        self._ahead = tuple(path[: common + accepted])
        return accepted == len(new_tokens) and not self._matcher.is_error()

    def _take_back(self) -> None:
        """Roll the parser back to the committed tokens."""
        self._read(self._ahead, ())

    def _give_up(self, why: str | None = None) -> None:
        """Record why the parser cannot continue, and create a new one; the committed text is unchanged."""
        self.error = why or self._error_text()
        self._restart()

    def _error_text(self) -> str:
        lines = self._matcher.get_error().strip().splitlines() if self._matcher.is_error() else []
        if lines and lines[0] in _DEAD_ENDS:
            return "no text fits the grammar"
        return lines[0] if lines else "the grammar does not allow these tokens here"

    def _restart(self) -> None:
        self._matcher = self._grammar.new_matcher()
        self._ahead, self._unread = (), list(self._committed)

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before the first end token."""
        end_ids = self._grammar.end_ids
        return list(takewhile(lambda token: token not in end_ids, tokens))


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """Return for each node the tokens from the first level to the node itself."""
    by_node: list[Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        by_node.append((*(by_node[parent] if parent >= 0 else ()), token))
    return by_node


def unpacked(bits: Bits, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return masks [rows, words] as booleans [rows, vocab]."""
    flat = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")
    return flat[:, :vocab_size].view(np.bool_)
