"""A suffix automaton over token texts that counts occurrences."""

from collections.abc import Sequence

ROOT = 0
_COUNTED_SUFFIXES = 32
"""Number of suffixes, from the longest on, that are counted per token. It limits the work on repetitive text."""

_BYTES_PER_STATE = 330  # approximate bytes per state with its edges, by tracemalloc on CPython 3.11


class SuffixAutomaton:
    """Holds all substrings of the added texts, in at most two states per token.

    A state is a set of substrings with the same end positions. By state, `lengths` has the length of its longest
    substring, `links` the state of the longest suffix that also occurs elsewhere, `counts` the number of occurrences.
    """

    def __init__(self) -> None:
        self.edges: list[dict[int, int]] = [{}]  # state -> token -> state
        self.links: list[int] = [-1]  # -1: the root has no suffix
        self.lengths: list[int] = [0]
        self.counts: list[int] = [0]
        self.num_tokens = 0
        self._last = ROOT  # the state of the whole current text

    def memory_bytes(self) -> int:
        return (len(self.edges) - 1) * _BYTES_PER_STATE

    def start_text(self) -> None:
        """Start a new text, which does not continue the previous one."""
        self._last = ROOT

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the current text."""
        for token in tokens:
            self._append(token)
            self._count(self._last)
        self.num_tokens += len(tokens)

    def earlier_suffix(self) -> int:
        """Return the state of the longest suffix of the current text that occurred before."""
        return ROOT if self._last == ROOT else self.links[self._last]

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state and length of the match after one more token, from a match of `length` in `state`."""
        while token not in self.edges[state]:
            if state == ROOT:
                return ROOT, 0
            state = self.links[state]
            length = self.lengths[state]
        return self.edges[state][token], length + 1

    def _append(self, token: int) -> None:
        """Append a token to the current text, by the usual construction of suffix automata (Blumer et al. 1985)."""
        existing = self.edges[self._last].get(token)
        if existing is not None:  # a new text repeats an old one from its start
            self._last = self._split(self._last, token, existing)
            return
        new = self._new_state({}, self.lengths[self._last] + 1, ROOT)
        state = self._last
        while state != -1 and token not in self.edges[state]:
            self.edges[state][token] = new
            state = self.links[state]
        if state != -1:
            self.links[new] = self._split(state, token, self.edges[state][token])
        self._last = new

    def _split(self, state: int, token: int, existing: int) -> int:
        """Return the state of the longest substring of `state` followed by `token`.

        The state `existing` contains it. If that has longer substrings too, they are separated.
        """
        length = self.lengths[state] + 1
        if self.lengths[existing] == length:
            return existing
        clone = self._new_state(dict(self.edges[existing]), length, self.links[existing])
        self.counts[clone] = self.counts[existing]
        self.links[existing] = clone
        while state != -1 and self.edges[state].get(token) == existing:
            self.edges[state][token] = clone
            state = self.links[state]
        return clone

    def _new_state(self, edges: dict[int, int], length: int, link: int) -> int:
        """Add a state that has not occurred yet; return its number."""
        self.edges.append(edges)
        self.lengths.append(length)
        self.links.append(link)
        self.counts.append(0)
        return len(self.edges) - 1

    def _count(self, state: int) -> None:
        """Count an occurrence of a state and of its longest suffixes."""
        for _ in range(_COUNTED_SUFFIXES):
            if state == -1:
                return
            self.counts[state] += 1
            state = self.links[state]
