"""What a drafter's calls take."""

from collections.abc import Sequence

FARTHEST = 4.0
"""A call counts as at most this many times as slow as was expected: one pause is no change."""

UNCHANGED = 0.25
TINY = 1e-3
"""Less than this a number of levels or asks has not changed."""

SLOWER = 2.0
"""Times as slow, or as fast, as was expected from which on a call is taken to be so in all of its parts."""

FEW_CALLS, ENOUGH_CALLS = 4, 8
"""Calls of different depths that tell what a level costs, and calls of one depth after which it is believed of all."""

FEW_BEHIND = 8
"""Tokens to catch up with from which on most of what a call takes beyond the expected is for them."""

FARTHEST_FADING = 0.98
"""What remains, after a call, of the most tokens that a drafter was behind by. Where it was far behind, a call that is
nearly up to date says next to nothing of what a token takes."""

MOST_SAVED = 50
"""Calls that what was saved counts as at most."""

MOST_SAVED_NUMBER = 1e9
"""Nothing that is saved of a call comes near it."""

SAVED_NUMBERS = 16

SETTLED_CALLS = 50
USUAL = 1.3
LOOKED_AT = 4
"""After so many calls, of those that are asked for as much and take as long as of late, within this factor, only every
fourth is looked at: it is much the same, and looking takes time."""


LEVELS_FIRST = 0.8
"""Part of what the number of asks explains from which on levels are blamed instead: where both have changed together
either explains nearly all, and it is levels that most drafters' calls take longer for."""

BEGINNING = 0.25
"""What one more request costs a drafter with passes of its own beside its levels, in what one of them costs."""


class CallCost:
    """A drafter's call by its levels and asks: a lookup costs the same at any depth, a model a pass per level, and the
    more requests are in a pass the longer it takes: a + b · levels + c · levels · asks + d · asks.

    Averages of late follow what a call takes; slopes are remembered longer, as the depth and the number of asks hardly
    change in some traffic. While neither has changed all of the cost counts as fixed. The first call says nothing: it
    fills caches, and a drafter that it made look dear would never be asked again. Nor does it count against a drafter
    that it was left out for a while and had to catch up: what that takes is kept apart, by tokens.
    """

    MEMORY = 0.1
    SLOPE_MEMORY = 0.02

    def __init__(self) -> None:
        self._is_warm = False
        self._seen = 0
        self._passed_over = 0
        self._late = (0.0, 0.0, 0.0)  # levels, asks, seconds: means of late
        self._means = (0.0, 0.0, 0.0)
        self._products = [0.0] * 5  # mean products of what differs from the means: see `_observe_slopes`
        self._seen_at = (1.0, 1.0)  # asks where levels have differed, levels where asks have
        self._caught_up = 0.0  # calls that had to, by how much they tell of it
        self._farthest = 0.0  # tokens that one of these was behind by of late
        self._behind = (0.0, 0.0, 0.0, 0.0)  # of these: tokens, seconds, and mean products of what differs
        self.per_token_behind = 0.0  # seconds

    def observe(self, levels: int, seconds: float, asks: int = 1, behind: int = 0) -> None:
        """One call; `behind` are tokens that came while the drafter was not asked."""
        if not self._is_warm:
            self._is_warm = True
            return
        if self._is_usual(levels, seconds, asks, behind):
            return
        seconds = self._without_pause(levels, seconds, asks, behind)
        if behind:
            left = self._without_catching_up(levels, seconds, asks, behind)
            if left is None:
                return
            seconds = left
        expected = self.seconds(levels, asks)
        self._seen += 1
        new = max(self.MEMORY, 1 / self._seen)
        if self._seen > ENOUGH_CALLS and not expected / SLOWER < seconds < expected * SLOWER:
            self._go_at(1 + new * (seconds / max(expected, 1e-9) - 1))
        late_levels, late_asks, late_seconds = self._late
        self._late = (
            late_levels + new * (levels - late_levels),
            late_asks + new * (asks - late_asks),
            late_seconds + new * (seconds - late_seconds),
        )
        self._observe_slopes(levels, asks, seconds)

    def _go_at(self, slower: float) -> None:
        """What makes a call far slower, or faster, makes every level so: it would else look fixed, and deeper drafts
        cheap, until calls of other depths were seen."""
        mean_levels, mean_asks, mean_seconds = self._means
        self._means = mean_levels, mean_asks, slower * mean_seconds
        ll, la, ls, aa, as_ = self._products
        self._products = [ll, la, slower * ls, aa, slower * as_]

    def _is_usual(self, levels: int, seconds: float, asks: int, behind: int) -> bool:
        """Whether the call says nothing that is worth the time to note it."""
        late_levels, late_asks, late_seconds = self._late
        if (
            behind
            or self._seen < SETTLED_CALLS
            or abs(levels - late_levels) + abs(asks - late_asks) > UNCHANGED
        ):
            return False
        self._passed_over = (self._passed_over + 1) % LOOKED_AT
        return bool(self._passed_over) and late_seconds < USUAL * seconds and seconds < USUAL * late_seconds

    def _observe_slopes(self, levels: int, asks: int, seconds: float) -> None:
        weight = max(self.SLOPE_MEMORY, 1 / self._seen)
        mean_levels, mean_asks, mean_seconds = self._means
        by_levels, by_asks, by_seconds = levels - mean_levels, asks - mean_asks, seconds - mean_seconds
        self._means = (
            mean_levels + weight * by_levels,
            mean_asks + weight * by_asks,
            mean_seconds + weight * by_seconds,
        )
        # A call like all others tells nothing of slopes, and must not make them forgotten.
        is_early = self._seen <= ENOUGH_CALLS
        has_levels, has_asks = is_early or abs(by_levels) >= UNCHANGED, is_early or abs(by_asks) >= UNCHANGED
        kept = 1 - weight
        ll, la, ls, aa, as_ = self._products  # of levels, asks and seconds
        at_asks, at_levels = self._seen_at
        if has_levels:
            ll, ls = (
                kept * (ll + weight * by_levels * by_levels),
                kept * (ls + weight * by_levels * by_seconds),
            )
            at_asks += kept * weight * by_levels * by_levels / max(ll, TINY) * (asks - at_asks)
        if has_asks:
            aa, as_ = kept * (aa + weight * by_asks * by_asks), kept * (as_ + weight * by_asks * by_seconds)
            at_levels += kept * weight * by_asks * by_asks / max(aa, TINY) * (levels - at_levels)
        self._seen_at = (at_asks, at_levels)
        if has_levels and has_asks:
            la = kept * (la + weight * by_levels * by_asks)
        self._products = [ll, la, ls, aa, as_]

    def _without_pause(self, levels: int, seconds: float, asks: int, behind: int) -> float:
        if self._seen < ENOUGH_CALLS or seconds <= FARTHEST * self._late[2]:
            return seconds
        return min(seconds, FARTHEST * (self.seconds(levels, asks) + self.per_token_behind * behind))

    def _without_catching_up(self, levels: int, seconds: float, asks: int, behind: int) -> float | None:
        """What the call would have taken; None if all that it tells is what catching up takes."""
        if not self._seen:
            self._caught_up += 1
            return self._split(seconds, behind, max(self.MEMORY, 1 / self._caught_up))
        self._farthest = max(behind, FARTHEST_FADING * self._farthest, FEW_BEHIND)
        share = (behind / self._farthest) ** 2
        self._caught_up += share
        weight = max(self.MEMORY, 1 / max(self._caught_up, 1.0))
        beyond = seconds - self.seconds(levels, asks) - self.per_token_behind * behind
        self.per_token_behind = max(self.per_token_behind + weight * share * beyond / behind, 0.0)
        if not self.per_token_behind:  # it is faster than it was, catching up or not
            return seconds
        is_known = self._seen >= ENOUGH_CALLS and behind > FEW_BEHIND
        return None if is_known else max(seconds - self.per_token_behind * behind, 0.0)

    def _split(self, seconds: float, behind: int, weight: float) -> float | None:
        """What a call takes beside catching up, where there was none without: by calls that were behind by different
        numbers of tokens. None as long as that cannot be told; where it never can, all of it.
        """
        tokens, usual, spread, common = self._behind
        by_tokens, by_seconds, kept = behind - tokens, seconds - usual, 1 - weight
        spread = kept * (spread + weight * by_tokens * by_tokens)
        common = kept * (common + weight * by_tokens * by_seconds)
        tokens, usual = tokens + weight * by_tokens, usual + weight * by_seconds
        self._behind = tokens, usual, spread, common
        if spread > 1:
            self.per_token_behind = max(common / spread, 0.0)
            return max(usual - self.per_token_behind * tokens, 0.0)
        return seconds if self._caught_up >= FEW_CALLS else None

    def as_json(self, slower: float = 1.0) -> list[float]:
        """Return plain numbers that `from_json` reads, as of a machine that is so many times as slow."""
        levels, asks, seconds = self._late
        mean_levels, mean_asks, mean_seconds = self._means
        ll, la, ls, aa, as_ = self._products
        return [
            min(self._seen, MOST_SAVED),
            *(levels, asks, slower * seconds),
            *(mean_levels, mean_asks, slower * mean_seconds),
            *(ll, la, slower * ls, aa, slower * as_),
            *self._seen_at,
            min(self._caught_up, MOST_SAVED),
            slower * self.per_token_behind,
        ]

    @staticmethod
    def from_json(saved: Sequence[float]) -> "CallCost":
        """What `as_json` has written; raises `ValueError` for anything else."""
        numbers = [float(number) for number in saved]
        if len(numbers) != SAVED_NUMBERS or not all(abs(number) < MOST_SAVED_NUMBER for number in numbers):
            raise ValueError("no costs of calls")
        if min(*numbers[:7], *numbers[12:]) < 0:  # only products can be
            raise ValueError("costs of calls below zero")
        cost = CallCost()
        cost._seen, cost._caught_up = int(numbers[0]), numbers[14]
        cost._late, cost._means = tuple(numbers[1:4]), tuple(numbers[4:7])  # type: ignore[assignment]
        cost._products, cost._seen_at = numbers[7:12], (max(numbers[12], 1.0), max(numbers[13], 0.0))
        cost.per_token_behind = max(numbers[15], 0.0)
        return cost

    @property
    def is_known(self) -> bool:
        """Whether calls of different depths were measured, or enough of one."""
        return self._seen >= FEW_CALLS and (self._products[0] > TINY or self._seen > ENOUGH_CALLS)

    def seconds(self, levels: float, asks: int = 1) -> float:
        """Expected time of a call; 0 before the first was measured."""
        late_levels, late_asks, late_seconds = self._late
        per_level, per_row, per_ask = self._parts()
        late = (per_level + per_row * late_asks) * late_levels
        fit = late_seconds / late if late > late_seconds else 1.0  # no part of the cost is negative
        left = late_seconds - fit * late
        per_ask = min(per_ask, left / late_asks if late_asks else 0.0)
        more = fit * ((per_level + per_row * asks) * levels - late)
        return late_seconds + more + per_ask * (asks - late_asks)

    def _parts(self) -> tuple[float, float, float]:
        """What a level costs, a level of one request, and a request.

        If the number of asks never changed, half of what a level costs one request is believed to grow with them: a
        head would else look all but free for many.
        """
        at_asks, at_levels = self._seen_at
        per_level, per_ask = self._slopes()
        if self._products[3] <= TINY:
            per_row = per_level / (1 + at_asks)
            per_ask = per_row * (at_levels + BEGINNING)
        per_row = min(per_ask / (at_levels + BEGINNING), per_level / at_asks)
        return per_level - per_row * at_asks, per_row, per_ask - per_row * at_levels

    def _slopes(self) -> tuple[float, float]:
        """What one more level costs, and one more ask, where they have differed."""
        ll, la, ls, aa, as_ = self._products
        both = ll * aa - la * la
        if both > TINY * ll * aa > 0:
            per_level, per_ask = (ls * aa - as_ * la) / both, (as_ * ll - ls * la) / both
            if per_level >= 0 and per_ask >= 0:
                return per_level, per_ask
        # Only one of them explains the cost: the one that explains more of it, or nearly as much.
        by_levels, by_asks = max(ls, 0.0) / ll if ll > TINY else 0.0, max(as_, 0.0) / aa if aa > TINY else 0.0
        is_of_levels = by_levels * ls > LEVELS_FIRST * by_asks * as_
        return (by_levels, 0.0) if is_of_levels else (0.0, by_asks)
