"""Predicted outputs: drafts along the answer that the user expects, tolerating edits."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from foreword.drafters.lookup.base import LookupDrafter
from foreword.drafters.registry import chosen_kind
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftTask, Traits
from foreword.speculation.settings import DrafterSettings

_COMPARED = 8  # trailing answer tokens compared when searching for its position
_LOOKED_AT = 64  # candidate positions per direction: limits the work for very repetitive texts
_NEAR = 32  # maximum distance of a position supported by a single token

_TRUSTED = 4
"""Consecutive tokens that make a position certain; until then searches start at the last certain one."""

_BYTES_PER_TOKEN = 120  # approximate bytes per predicted token, by tracemalloc on CPython 3.11


class Follower:
    """Tracks the position of an answer in the expected text. It depends only on the answer's tokens."""

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = expected
        self._places: dict[int, list[int]] = {}  # token -> its positions
        for position, token in enumerate(expected):
            self._places.setdefault(token, []).append(position)
        self._tail: deque[int] = deque(maxlen=_COMPARED)  # newest tokens of the answer
        self._next: int | None = 0  # expected next position; None: the answer has left the text
        self._certain = 0  # last certain position
        # tokens supporting the position; initially the answer is assumed to start with the text
        self._run = _TRUSTED
        self._unclaimed = 0  # answer tokens since the position was lost
        self._doubtful = 0  # matched answer tokens that are not confirmed yet
        self.read_tokens = 0
        self.followed = 0  # answer tokens found in the text

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tail.append(token)
            self.read_tokens += 1
            if (
                self._next is not None
                and self._next < len(self._expected)
                and self._expected[self._next] == token
            ):
                self._go_on(self._next + 1, self._run + 1, 1)
            else:
                self._next, self._doubtful = None, 0
                self._unclaimed += 1
                self._find()

    def continuation(self, most: int) -> Sequence[int]:
        """Return the expected continuation, shorter if the position is less certain."""
        if self._next is None:
            return ()
        count = most if self._run >= _TRUSTED else min(most, 2 * self._run)
        return self._expected[self._next : self._next + count]

    def memory_bytes(self) -> int:
        return _BYTES_PER_TOKEN * len(self._expected)

    def _go_on(self, position: int, run: int, found: int) -> None:
        self._next, self._run, self._unclaimed = position, run, 0
        if run == 1:
            self._doubtful = found  # one token may match by chance: the next one decides
        else:
            self.followed += self._doubtful + found
            self._doubtful = 0
        if run >= _TRUSTED:
            self._certain = position

    def _find(self) -> None:
        """Find the position with the longest match before it; of equal matches the nearest, forward first.

        A match before the current position needs `_TRUSTED` tokens, since answers rarely repeat themselves.
        """
        places = self._places.get(self._tail[-1], [])
        here = bisect_left(places, self._certain)
        best = (0, 0, 0)  # (match length, nearness, position)
        for place in places[here : here + _LOOKED_AT]:
            length = self._matched(place)
            if length > 1 or place - self._certain < _NEAR:
                best = max(best, (length, self._certain - place, place))
        for place in places[max(0, here - _LOOKED_AT) : here]:
            length = self._matched(place)
            if length >= _TRUSTED:
                best = max(best, (length, place - self._certain - len(self._expected), place))
        length, _, place = best
        if length:
            self._go_on(place + 1, length, min(length, self._unclaimed))

    def _matched(self, place: int) -> int:
        """Return how many trailing answer tokens match the text up to this position."""
        length = 0
        for token in reversed(self._tail):
            if place < length or self._expected[place - length] != token:
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


KIND = chosen_kind(
    "follows the answer that the request's user expects",
    DrafterSettings,
    lambda _, __: PredictionDrafter(),
    traits=PredictionDrafter.traits,
)
