"""Predicted outputs: draft along a text that the user expects as the answer, edits here and there."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from foreword.drafters.lookup.by_request import LookupDrafter
from foreword.drafters.registry import NoSettings, chosen_kind
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftTask, Traits

_COMPARED = 8
"""Tokens at the end of the answer that are compared when its place is looked for."""

_LOOKED_AT = 64
"""Places in each direction that are looked at: bounds the work for a text of one token over and over."""

_NEAR = 32
"""A place that only one token speaks for must be so near."""

_TRUSTED = 4
"""Tokens in a row that make a place certain; before that the last certain one is where a search begins."""

_BYTES_PER_TOKEN = 120
"""Memory of a predicted token: its entry in the lists of places, as tracemalloc has it on CPython 3.11."""


class Follower:
    """Where in the expected text an answer is. What it says depends on the answer alone, not on when it was asked."""

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = expected
        self._places: dict[int, list[int]] = {}  # token -> its positions
        for position, token in enumerate(expected):
            self._places.setdefault(token, []).append(position)
        self._tail: deque[int] = deque(maxlen=_COMPARED)  # the answer's newest tokens
        self._next: int | None = 0  # position that is expected next; None: the answer has left the text
        self._certain = 0  # where it surely was last
        self._run = _TRUSTED  # tokens that speak for the place; an answer is expected to begin with the text
        self._unclaimed = 0  # tokens since it was left
        self._doubtful = 0  # tokens that were found, but nothing else speaks for it
        self.read_tokens = 0
        self.followed = 0  # tokens of the answer that were found in the text

    def read(self, tokens: Sequence[int]) -> None:
        """The answer has grown by these."""
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
        """What the text has next; the less speaks for the place, the less of it."""
        if self._next is None:
            return ()
        count = most if self._run >= _TRUSTED else min(most, 2 * self._run)
        return self._expected[self._next : self._next + count]

    def memory_bytes(self) -> int:
        """About what it takes."""
        return _BYTES_PER_TOKEN * len(self._expected)

    def _go_on(self, position: int, run: int, found: int) -> None:
        self._next, self._run, self._unclaimed = position, run, 0
        if run == 1:
            self._doubtful = found  # one token may be there by chance: the next decides whether it counts
        else:
            self.followed += self._doubtful + found
            self._doubtful = 0
        if run >= _TRUSTED:
            self._certain = position

    def _find(self) -> None:
        """Find the place with the longest match before it; of equals the nearest, those ahead first.

        Backwards only by a match that is certain: an answer rarely repeats what it has passed.
        """
        places = self._places.get(self._tail[-1], [])
        here = bisect_left(places, self._certain)
        best = (0, 0, 0)  # (length of the match, nearness, position)
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
        """Tokens at the end of the answer that are those up to this place."""
        length = 0
        for token in reversed(self._tail):
            if place < length or self._expected[place - length] != token:
                break
            length += 1
        return length


class PredictionDrafter(LookupDrafter[Follower]):
    """Drafts chains along the expected answer of each request; nothing for requests without one."""

    traits = Traits(follows="prediction")

    def memory_bytes(self) -> int:
        """About what the texts of running requests take."""
        return sum(follower.memory_bytes() for follower in self._known.values())

    def draft(self, task: DraftTask) -> Draft:
        """A chain, empty where the answer has left the expected text."""
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
    """Tokens of the expected text that are in the answer, as `PredictionDrafter` finds them."""
    follower = Follower(expected)
    follower.read(answer)
    return min(follower.followed, len(expected))


KIND = chosen_kind(
    "follows the answer that the request's user expects",
    NoSettings,
    lambda _, __: PredictionDrafter(),
    traits=PredictionDrafter.traits,
)
