"""Draws against the chances that were told for them.

Something that should happen with chance p_i in draw i (the likeliest token is drawn, say) does or does not. A gambler
bets on it at fair odds: e^λ / (1 − p + p e^λ) for one if it happens, 1 / (1 − p + p e^λ) if not. The mean of that is
1, whatever came before, so the chance that the gambler ever has 1/α times the money of the beginning is at most α
(Ville): exact for any number of draws, of any laws, dependent through their pasts. Many gamblers with one λ and one
event each share the money of the beginning; together they have the same bound.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreword.proofs.server.verdict import CONFIDENCE

Floats = NDArray[np.float64]

BETS = np.array([sign * size for size in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0) for sign in (1, -1)])
"""λ of each gambler: the event comes too often, or too seldom, a little or much."""

_NORMAL = 1.645  # standard deviations that CONFIDENCE leaves on one side


def gains(chances: Floats, happened: NDArray[np.bool_]) -> Floats:
    """[events, bets], what each gambler has gained, as a logarithm; both arguments are [draws, events]."""
    stakes = np.empty((chances.shape[1], len(BETS)))
    for place, bet in enumerate(BETS):
        fair = np.log1p(chances * np.expm1(bet))
        stakes[:, place] = bet * happened.sum(axis=0) - fair.sum(axis=0)
    return stakes


def log_evidence(chances: Floats, happened: NDArray[np.bool_]) -> float:
    """Logarithm of what all gamblers together have of each unit that they began with."""
    if not chances.size:
        return 0.0
    return log_mean(gains(chances, happened))


def log_mean(logs: Floats) -> float:
    top = float(logs.max())
    return top + float(np.log(np.exp(logs - top).mean()))


def visible_bias(chances: Floats, gamblers: int, alarm: float) -> float:
    """The smallest total variation that would have been seen with `CONFIDENCE`.

    Of a sampler that takes the event too easily: it forces it with chance b and draws rightly otherwise. The gamblers'
    logarithms are sums over draws, taken as normal; one gambler alone has to make the alarm.
    """
    if not chances.size:
        return 1.0
    needed = np.log(gamblers / alarm)

    def is_seen(bias: float) -> bool:
        biased = chances + bias * (1 - chances)
        for bet in BETS[BETS > 0]:
            mean = (biased * bet - np.log1p(chances * np.expm1(bet))).sum()
            spread = bet * np.sqrt((biased * (1 - biased)).sum())
            if mean - _NORMAL * spread >= needed:
                return True
        return False

    low, high = 0.0, 1.0
    if not is_seen(high):
        return 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if is_seen(middle) else (middle, high)
    return float(high * (1 - chances).mean())


@dataclass(frozen=True)
class Distance:
    """Total variation between a known law and draws from what should be it."""

    seen: float  # between the law and the draws' shares
    upper: float  # what the true one exceeds with 1 - CONFIDENCE at most (McDiarmid)


def distance(counts: Floats, law: Floats) -> Distance:
    """Of one place: counts and chances of the same cells."""
    draws = counts.sum()
    seen = float(np.abs(counts / draws - law).sum() / 2)
    spread = float(np.sqrt(np.log(1 / (1 - CONFIDENCE)) / (2 * draws)))
    return Distance(seen, min(seen + spread, 1.0))
