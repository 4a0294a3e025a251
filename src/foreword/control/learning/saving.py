"""Estimates as plain JSON values, so that an engine that is started again knows what the last one has learned."""

from collections.abc import Mapping
from typing import Any

from foreword.control.learning.estimates import MAX_PAIRS, Estimates, owner_of
from foreword.control.learning.fading import FadingCounts, left_after

MOST_ASKS = 200.0
"""Asks that what was saved counts as at most: the traffic may have changed since."""


def estimates_as_json(estimates: Estimates, seconds: float = 0.0) -> dict[str, Any]:
    """The pairs that were seen last: drafters are known by them. Whose cohort it is cannot be read from it.

    They are written as they have faded at this time of the engine's: those that do not come back are not young again
    with every restart.
    """
    saved = {key: counts.as_json(left_after(seconds)) for key, counts in estimates.saved.items()}
    pairs = {
        (method, owner_of(tenant), cohort): pair.counts.as_json(pair.left(seconds))
        for (method, tenant, cohort), pair in estimates.pairs.items()
    }
    newest = list({**saved, **pairs}.items())[-MAX_PAIRS:]
    return {"pairs": [[*key, counts] for key, counts in newest]}


def restore_estimates(estimates: Estimates, saved: Mapping[str, Any]) -> None:
    """Begin with what `estimates_as_json` has written; raises `ValueError` and changes nothing for anything else."""
    try:
        pairs = {
            (str(method), str(owner), str(cohort)): _counts(value)
            for method, owner, cohort, value in saved["pairs"]
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no estimates: {error}") from None
    if len(pairs) > MAX_PAIRS:
        raise ValueError("more estimates than are ever kept")
    for (method, _, _), counts in pairs.items():
        estimates.drafter(method).new_cohort(counts)
    estimates.saved = pairs


def _counts(value: Mapping[str, Any]) -> FadingCounts:
    counts = FadingCounts.from_json(value)
    if counts.asks > MOST_ASKS:
        counts.fade(MOST_ASKS / counts.asks)
    return counts
