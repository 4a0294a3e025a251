"""The time of a drafter's calls by levels and requests."""

from collections.abc import Sequence

from foreword.speculation.measured.settings import COSTS

UNCHANGED, TINY = 0.25, 1e-3
"""Difference of levels or requests, and mean square of it, below which they have not changed."""

SLOPE_MEMORY = 0.2
"""Memory of slopes, as part of the memory of the mean: depth and requests hardly change in some traffic."""

CHANGED = 2.0
"""Times as slow, or as fast, as expected from which on a call is so in all of its parts."""

MOST_SAVED, MOST_NUMBER, NUMBERS = 50, 1e9, 16
"""Calls that saved ones count as at most; a bound on saved numbers, and how many of them there are."""


class CallCost:
    """Expected seconds = a + b · levels + c · levels · requests + d · requests, fitted to recent calls.

    A lookup costs the same at any depth, a model a pass per level, which is longer the more requests are in it.
    The mean follows recent calls; slopes are remembered longer. Until levels or requests have changed all is fixed.
    The first call is ignored: it fills caches. What catching up costs is estimated apart, by tokens.
    """

    def __init__(self) -> None:
        self._is_warm = False
        self._seen = 0
        self._recent = (0.0, 0.0, 0.0)  # levels, requests, seconds: recent means
        self._means = (0.0, 0.0, 0.0)  # the same, remembered longer
        self._products = [
            0.0
        ] * 5  # mean products of differences: levels², levels·requests, levels·s, requests², r·s
        self._seen_at = (1.0, 1.0)  # requests where levels have differed, levels where requests have
        self._caught_up = 0.0  # calls of a drafter that lagged, by how much they tell
        self._farthest = 0.0  # tokens that one of these lagged recently
        self._lags = (0.0, 0.0, 0.0, 0.0)  # of these: tokens, seconds, and mean products of differences
        self.per_token_behind = 0.0  # seconds

    def observe(self, levels: int, seconds: float, asks: int = 1, behind: int = 0) -> None:
        """Learn from a call for `asks` requests; `behind` tokens came since the drafter was last called."""
        if not self._is_warm:
            self._is_warm = True
            return
        is_known = self._seen >= 2 * COSTS.few_calls
        if is_known:  # one pause is no change
            seconds = min(
                seconds, COSTS.farthest * (self.seconds(levels, asks) + self.per_token_behind * behind)
            )
        if behind:
            left = self._without_catching_up(levels, seconds, asks, behind)
            if left is None:
                return
            seconds = left
        expected = self.seconds(levels, asks)
        self._seen += 1
        weight = max(COSTS.memory, 1 / self._seen)
        if is_known and not expected / CHANGED < seconds < expected * CHANGED:
            self._scale(1 + weight * (seconds / max(expected, 1e-9) - 1))
        new = (levels, asks, seconds)
        recent = zip(self._recent, new, strict=True)
        self._recent = tuple(old + weight * (one - old) for old, one in recent)  # type: ignore[assignment]
        self._observe_slopes(levels, asks, seconds)

    def _scale(self, slower: float) -> None:
        """Make all parts slower: else deeper drafts would look cheap until calls of other depths were seen."""
        mean_levels, mean_asks, mean_seconds = self._means
        self._means = mean_levels, mean_asks, slower * mean_seconds
        ll, la, ls, aa, as_ = self._products
        self._products = [ll, la, slower * ls, aa, slower * as_]

    def _observe_slopes(self, levels: int, asks: int, seconds: float) -> None:
        weight = max(SLOPE_MEMORY * COSTS.memory, 1 / self._seen)
        by_levels, by_asks, by_seconds = (
            one - mean for one, mean in zip((levels, asks, seconds), self._means, strict=True)
        )
        mean_levels, mean_asks, mean_seconds = self._means
        self._means = (
            mean_levels + weight * by_levels,
            mean_asks + weight * by_asks,
            mean_seconds + weight * by_seconds,
        )
        # A call like all others tells nothing of slopes, and must not make them forgotten.
        is_early, kept = self._seen <= 2 * COSTS.few_calls, 1 - weight
        has_levels, has_asks = is_early or abs(by_levels) >= UNCHANGED, is_early or abs(by_asks) >= UNCHANGED
        ll, la, ls, aa, as_ = self._products
        at_asks, at_levels = self._seen_at
        if has_levels:
            ll, ls = kept * (ll + weight * by_levels**2), kept * (ls + weight * by_levels * by_seconds)
            at_asks += kept * weight * by_levels**2 / max(ll, TINY) * (asks - at_asks)
        if has_asks:
            aa, as_ = kept * (aa + weight * by_asks**2), kept * (as_ + weight * by_asks * by_seconds)
            at_levels += kept * weight * by_asks**2 / max(aa, TINY) * (levels - at_levels)
        if has_levels and has_asks:
            la = kept * (la + weight * by_levels * by_asks)
        self._seen_at, self._products = (at_asks, at_levels), [ll, la, ls, aa, as_]

    def _without_catching_up(self, levels: int, seconds: float, asks: int, behind: int) -> float | None:
        """Return what the call would have taken up to date; None if it only tells what catching up takes."""
        few = 2 * COSTS.few_calls
        if not self._seen:
            return self._split(seconds, behind)
        # Beside calls that lagged far, one that is nearly up to date tells next to nothing of a token's cost.
        self._farthest = max(behind, (1 - COSTS.shape_memory) * self._farthest, few)
        share = (behind / self._farthest) ** 2
        self._caught_up += share
        weight = max(COSTS.memory, 1 / max(self._caught_up, 1.0))
        beyond = seconds - self.seconds(levels, asks) - self.per_token_behind * behind
        self.per_token_behind = max(self.per_token_behind + weight * share * beyond / behind, 0.0)
        if not self.per_token_behind:  # it is faster than it was, lagging or not
            return seconds
        return (
            None if self._seen >= few and behind > few else max(seconds - self.per_token_behind * behind, 0.0)
        )

    def _split(self, seconds: float, behind: int) -> float | None:
        """Return a call's own time where none was up to date, by calls with different lags; None while unknown."""
        self._caught_up += 1
        weight = max(COSTS.memory, 1 / self._caught_up)
        tokens, usual, spread, common = self._lags
        by_tokens, by_seconds, kept = behind - tokens, seconds - usual, 1 - weight
        spread, common = (
            kept * (spread + weight * by_tokens**2),
            kept * (common + weight * by_tokens * by_seconds),
        )
        tokens, usual = tokens + weight * by_tokens, usual + weight * by_seconds
        self._lags = tokens, usual, spread, common
        if spread > 1:
            self.per_token_behind = max(common / spread, 0.0)
            return max(usual - self.per_token_behind * tokens, 0.0)
        return seconds if self._caught_up >= COSTS.few_calls else None

    def as_json(self, slower: float = 1.0) -> list[float]:
        """Return plain numbers that `from_json` reads, as of a machine that is so many times as slow."""
        levels, asks, seconds = self._recent
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
        """Return what `as_json` has written; raises `ValueError` for anything else."""
        numbers = [float(number) for number in saved]
        if len(numbers) != NUMBERS or not all(abs(number) < MOST_NUMBER for number in numbers):
            raise ValueError("no costs of calls")
        if min(*numbers[:7], *numbers[12:]) < 0:  # only products can be
            raise ValueError("costs of calls below zero")
        cost = CallCost()
        cost._seen, cost._caught_up = int(numbers[0]), numbers[14]
        cost._recent, cost._means = tuple(numbers[1:4]), tuple(numbers[4:7])  # type: ignore[assignment]
        cost._products, cost._seen_at = numbers[7:12], (max(numbers[12], 1.0), numbers[13])
        cost.per_token_behind = numbers[15]
        return cost

    @property
    def is_known(self) -> bool:
        """Whether calls of different depths were measured, or enough of one."""
        return self._seen >= COSTS.few_calls and (
            self._products[0] > TINY or self._seen > 2 * COSTS.few_calls
        )

    def seconds(self, levels: float, asks: int = 1) -> float:
        """Return the expected time of a call; 0 before the first was measured."""
        recent_levels, recent_asks, recent_seconds = self._recent
        per_level, per_row, per_ask = self._parts()
        recent = (per_level + per_row * recent_asks) * recent_levels
        fit = recent_seconds / recent if recent > recent_seconds else 1.0  # no part of the cost is negative
        left = recent_seconds - fit * recent
        per_ask = min(per_ask, left / recent_asks if recent_asks else 0.0)
        more = fit * ((per_level + per_row * asks) * levels - recent)
        return recent_seconds + more + per_ask * (asks - recent_asks)

    def _parts(self) -> tuple[float, float, float]:
        """Return what a level costs, a level of one request, and a request.

        While the number of requests never changed, half of a level's cost is taken to grow with them, and a request to
        cost a quarter of a level beside: a head would else look nearly free for many.
        """
        at_asks, at_levels = self._seen_at
        per_level, per_ask = self._slopes()
        if self._products[3] <= TINY:
            per_row = per_level / (1 + at_asks)
            per_ask = per_row * (at_levels + 0.25)
        per_row = min(per_ask / (at_levels + 0.25), per_level / at_asks)
        return per_level - per_row * at_asks, per_row, per_ask - per_row * at_levels

    def _slopes(self) -> tuple[float, float]:
        """Return what one more level costs, and one more request, where they have differed."""
        ll, la, ls, aa, as_ = self._products
        both = ll * aa - la * la
        if both > TINY * ll * aa > 0:
            per_level, per_ask = (ls * aa - as_ * la) / both, (as_ * ll - ls * la) / both
            if per_level >= 0 and per_ask >= 0:
                return per_level, per_ask
        # Only one explains the cost. Where both have changed together either does; most drafters cost by levels.
        by_levels, by_asks = max(ls, 0.0) / ll if ll > TINY else 0.0, max(as_, 0.0) / aa if aa > TINY else 0.0
        return (by_levels, 0.0) if by_levels * ls > 0.8 * by_asks * as_ else (0.0, by_asks)
