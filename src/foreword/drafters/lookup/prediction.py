"""Predicted outputs: drafts the text that the request states as the expected answer, also where the answer differs."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from foreword.drafters.lookup.base import LookupDrafter
from foreword.drafters.registry import chosen_kind
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftTask, Traits

# Number of newest answer tokens that are compared to find the position in the expected text.
_COMPARED_TOKENS = 8
_MAX_CANDIDATES = 64  # positions searched per direction, which limits the work for very repetitive texts
_NEAR = 32  # maximum distance, in tokens, of a position where only one token matches

_CERTAIN_TOKENS = 4
"""Matching tokens in a row that make a position certain. Searches start at the last certain position."""

_BYTES_PER_TOKEN = 120  # approximate bytes per predicted token, by tracemalloc on CPython 3.11


class Follower:
    """Tracks the position of an answer in the expected text, as a function of the answer's tokens alone."""

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = expected
        self._positions: dict[int, list[int]] = {}  # of each token in the expected text
        for position, token in enumerate(expected):
            self._positions.setdefault(token, []).append(position)
        self._tail: deque[int] = deque(maxlen=_COMPARED_TOKENS)  # newest tokens of the answer
        self._next: int | None = 0  # expected next position; None: the answer has left the text
        self._certain = 0  # last certain position
        # Matching tokens before the position. At first the answer is assumed to start with the text.
        self._matched_tokens = _CERTAIN_TOKENS
        self._unmatched = 0  # answer tokens since the position was lost
        self._doubtful = 0  # matching answer tokens that may be a coincidence, not in `followed` yet
        self.read_tokens = 0  # answer tokens read so far
        self.followed = 0  # answer tokens found in the expected text

    def read(self, tokens: Sequence[int]) -> None:
        """Read new answer tokens, and update the position."""
        for token in tokens:
            self._tail.append(token)
            self.read_tokens += 1
            if (
                self._next is not None
                and self._next < len(self._expected)
                and self._expected[self._next] == token
            ):
                self._move_to(self._next + 1, self._matched_tokens + 1, 1)
            else:
                self._next, self._doubtful = None, 0
                self._unmatched += 1
                self._find()

    def continuation(self, most: int) -> Sequence[int]:
        """Return the expected continuation, shorter if the position is less certain."""
        if self._next is None:
            return ()
        count = most if self._matched_tokens >= _CERTAIN_TOKENS else min(most, 2 * self._matched_tokens)
        return self._expected[self._next : self._next + count]

    def memory_bytes(self) -> int:
        return _BYTES_PER_TOKEN * len(self._expected)

    def _move_to(self, position: int, matched: int, new_matches: int) -> None:
        """Set the next position. `matched` tokens before it match, of which `new_matches` are not counted yet."""
        self._next, self._matched_tokens, self._unmatched = position, matched, 0
        if matched == 1:
            self._doubtful = new_matches  # a single token may match by chance: the next token decides
        else:
            self.followed += self._doubtful + new_matches
            self._doubtful = 0
        if matched >= _CERTAIN_TOKENS:
            self._certain = position

    def _find(self) -> None:
        """Move to the position with the longest match; of equal matches to the nearest, later positions first.

        A match before the last certain position needs `_CERTAIN_TOKENS` tokens, since answers rarely repeat themselves.
        """
        positions = self._positions.get(self._tail[-1], [])
        here = bisect_left(positions, self._certain)
        best = (0, 0, 0)  # (match length, nearness, position)
        for position in positions[here : here + _MAX_CANDIDATES]:
            length = self._matched(position)
            if length > 1 or position - self._certain < _NEAR:
                best = max(best, (length, self._certain - position, position))
        for position in positions[max(0, here - _MAX_CANDIDATES) : here]:
            length = self._matched(position)
            if length >= _CERTAIN_TOKENS:
                # Subtracting the length of the text ranks all earlier positions after all later ones.
                best = max(best, (length, position - self._certain - len(self._expected), position))
        length, _, position = best
        if length:
            self._move_to(position + 1, length, min(length, self._unmatched))

    def _matched(self, position: int) -> int:
        """Return how many trailing answer tokens match the text up to this position."""
        length = 0
        for token in reversed(self._tail):
            if position < length or self._expected[position - length] != token:
                break
            length += 1
        return length


class PredictionDrafter(LookupDrafter[Follower]):
    """Drafts chains along each request's expected answer."""

    traits = Traits(follows="prediction")

    def memory_bytes(self) -> int:
        return sum(follower.memory_bytes() for follower in self._known.values())

    def draft(self, task: DraftTask) -> Draft:
        """Return a chain; empty if the answer has left the expected text."""
        request = task.request
        if not request.prediction:
            return Draft()
        follower = self._known.get(request.request_id)
        if follower is None or request.prompt_len + follower.read_tokens > len(request.tokens):
            follower = self._known[request.request_id] = Follower(request.prediction)
        follower.read(request.tokens[request.prompt_len + follower.read_tokens :])
        drafted = follower.continuation(min(task.max_nodes, task.max_depth))
        return Draft.chain(drafted, len(request.tokens), request.epoch)


def count_followed(expected: Sequence[int], answer: Sequence[int]) -> int:
    """Return how many tokens of the expected text occur in the answer, as the drafter matches them."""
    follower = Follower(expected)
    follower.read(answer)
    return min(follower.followed, len(expected))


KIND = chosen_kind(PredictionDrafter, "follows the answer that the request's user expects")
