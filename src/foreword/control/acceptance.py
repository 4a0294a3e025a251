"""Expected acceptance of draft tokens: published → pooled → cohort → request, each the prior of the next."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from foreword.control.counts import LEVELS, DraftCounts
from foreword.control.rates import Rates
from foreword.control.settings import DEFAULTS
from foreword.speculation.confidence import CLASSES, MIDDLES

PRIOR_RATE, PRIOR_COVERAGE, HEAD_COVERAGE = 0.6, 0.5, 1.0
"""Optimistic priors of an unknown drafter, so that it is tried; a head always has a draft."""

MAX_ESTIMATES, POOLED_COHORTS = 256, 32
"""Maximum number of (drafter, cohort) estimates, and number of newest cohorts in a drafter's pooled estimate."""

_SLOW: float = 0.5 ** (1 / DEFAULTS.half_life_drafts)


def left_after(seconds: float) -> float:
    """Return the fraction of counts that remains after this time."""
    left: float = 0.5 ** (seconds / DEFAULTS.half_life_seconds)
    return left


class PooledEstimate:
    """A drafter's acceptance over all cohorts: the prior of new cohorts, and all that tenants share.

    Each cohort counts as at most a few drafts, because cohorts differ from each other about as much as that many
    drafts do by chance.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self.coverage = PRIOR_COVERAGE  # prior
        self.published: Sequence[float] = ()  # [level], published acceptance rates
        # engine seconds of each cohort's last decay
        self.cohorts: OrderedDict[DraftCounts, float] = OrderedDict()
        self._counts: DraftCounts | None = None

    def begin_with(self, coverage: float, published: Sequence[float]) -> None:
        """Set the prior."""
        if (coverage, published) != (self.coverage, self.published):
            self.coverage, self.published, self._counts = coverage, published, None

    def touch(self, counts: DraftCounts, seconds: float) -> None:
        """Record the engine time of a cohort's counts, unless the cohort was dropped."""
        if counts in self.cohorts:
            self.cohorts[counts] = seconds
            self.cohorts.move_to_end(counts)
            self._counts = None

    def forget(self, counts: DraftCounts) -> None:
        self.cohorts.pop(counts, None)
        self._counts = None

    @property
    def counts(self) -> DraftCounts:
        """The newest cohorts' counts together; cached until one of them is re-evaluated."""
        if self._counts is None:
            self._counts, weight = DraftCounts(), self.cohort_strength
            newest = list(self.cohorts.items())[-POOLED_COHORTS:]
            now = max((seconds for _, seconds in newest), default=0.0)
            for counts, seconds in newest:
                self._counts.add_share(counts, weight, left_after(now - seconds))
        return self._counts

    @property
    def cohort_strength(self) -> float:
        """Pseudo-count of the pooled estimate in a cohort's estimate; smaller for lookups, which vary more."""
        return DEFAULTS.lookup_drafts if self.coverage < HEAD_COVERAGE else DEFAULTS.cohort_drafts

    def rate(self, level: int, above: float) -> float:
        """Return the acceptance of a level's first node; `above` is the rate of the level above."""
        if level < len(self.published):
            return self.counts.rate(level, 0, self.published[level], DEFAULTS.cohort_drafts)
        return self.counts.rate(level, 0, above, DEFAULTS.prior_drafts)


class Estimate:
    """The acceptance of a drafter in one cohort of one tenant."""

    def __init__(self, pooled: PooledEstimate, cohort: str, counts: DraftCounts) -> None:
        self.pooled, self.method, self.cohort, self.counts = pooled, pooled.method, cohort, counts
        self.changes = 0  # number of detected changes
        self.levels = 0  # levels judged so far
        self.requests = 0  # total draft requests
        self._depth = 0  # maximum requested depth; 0: unknown
        self._fast_drafts = 0  # remaining drafts with fast forgetting
        self._above = self._below = 0.0  # CUSUM evidence of higher or lower acceptance
        self._seconds = 0.0  # engine time of the last decay
        self._rates: Rates | None = None

    @property
    def rates(self) -> Rates:
        """Current rates; cached until `refresh`."""
        if self._rates is None:
            self._rates = self._estimate()
        return self._rates

    @property
    def is_new(self) -> bool:
        return self.counts.requests < DEFAULTS.new_requests

    @property
    def is_unsettled(self) -> bool:
        """Whether the cohort is new or has just changed."""
        return self._fast_drafts > DEFAULTS.change_drafts // 2 or self.is_new

    @property
    def is_unknown(self) -> bool:
        """Whether exploration is valuable: the cohort is new and few others are known."""
        is_pool_known = self.pooled.counts.requests >= 3 * self.pooled.cohort_strength
        return self.is_unsettled and (bool(self._fast_drafts) or not is_pool_known)

    def need(self, depth: int) -> None:
        """Limit the computed rates to drafts of `depth` levels."""
        if depth > self._depth:
            self._depth, self._rates = depth, None

    def refresh(self, seconds: float) -> None:
        """Include observations up to this engine time."""
        if seconds > self._seconds:
            self.counts.fade(self.left(seconds))
            self._seconds = seconds
        self.pooled.touch(self.counts, self._seconds)
        self._rates = None

    def left(self, seconds: float) -> float:
        """Return the fraction of its counts that remains at this engine time."""
        return left_after(seconds - self._seconds)

    def requested(self, levels: int, depth: int, useful: int | None = None) -> None:
        """Count a draft request, its draft's depth (0: no draft), and its useful levels (None: all)."""
        self.requests += 1
        self.counts.count_request(levels, depth, depth if useful is None else useful)
        if not depth:
            self._fade()

    def finished(self, accepted: int, expected: float) -> None:
        """Decay the counts after a judged draft, and test for a change."""
        self.levels += accepted or 1
        self._fade()
        if self._fast_drafts:
            self._fast_drafts -= 1
            if self._fast_drafts > DEFAULTS.change_drafts // 2:
                return  # already adapting to a change
        off, slack = accepted - expected, DEFAULTS.change_slack
        self._above = max(self._above + off - slack, 0.0)
        self._below = max(self._below - off - slack, 0.0)
        if max(self._above, self._below) > DEFAULTS.change_limit:
            self._above = self._below = 0.0
            self._fast_drafts = DEFAULTS.change_drafts
            self.changes += 1
            self.counts.fade(min(DEFAULTS.cohort_drafts / max(self.counts.requests, 1.0), 0.25))
            self._rates = None

    def _fade(self) -> None:
        self.counts.fade(_SLOW**10 if self._fast_drafts else _SLOW)

    @property
    def _strength(self) -> float:
        # After a change the prior weighs less, so that the estimate can follow.
        return DEFAULTS.lookup_drafts if self._fast_drafts else self.pooled.cohort_strength

    def _estimate(self) -> Rates:
        own, pooled, strength, weak = self.counts, self.pooled.counts, self._strength, DEFAULTS.prior_drafts
        accepted, presence = [], []
        above = above_here = PRIOR_RATE  # pooled and own rate of the level above
        present = 1.0
        for level in range(self._most_levels):
            known = self.pooled.rate(level, above)
            # An unseen level deviates from the pooled rate like the level above.
            prior = min(known * above_here / above, 1.0) if level >= own.levels and above > 0 else known
            ranks, before = [own.rate(level, 0, prior, strength)], known
            for rank in range(1, max(pooled.ranks(level), own.ranks(level))):
                one = pooled.rate(level, rank, (1 - before) / 2, weak)
                before += one
                ranks.append(own.rate(level, rank, one, strength))
            above, above_here = known, ranks[0]
            accepted.append(ranks)
            present = pooled.presence(level, present, weak)
            presence.append(own.presence(level, present, strength))
        classes = [(one, pooled.class_rate(one, MIDDLES[one], weak)) for one in range(CLASSES)]
        by_class = [own.class_rate(one, prior, strength) for one, prior in classes]
        return Rates(accepted, self._coverage(1), presence, self._coverage(0), by_class)

    @property
    def _most_levels(self) -> int:
        return min(self._depth or LEVELS, LEVELS)

    def _coverage(self, which: int) -> list[float]:
        """Return [level] the fraction of draft requests that have the level (`which` 0), or have it useful (1)."""
        pooled, own, strength = self.pooled.counts.coverages(), self.counts.coverages(), self._strength
        known, here, prior = self.pooled.coverage, 1.0, DEFAULTS.prior_drafts
        continued, shares = 1.0, []  # fraction of the level above; an unseen level continues like it
        for level in range(self._most_levels):
            above = known
            known = (prior * known * continued + pooled[level][which]) / (prior + pooled[level][2])
            here = min((strength * known + own[level][which]) / (strength + own[level][2]), here)
            continued = min(known / above, 1.0) if level and above else 1.0
            shares.append(here)
        return shares


def owner_of(tenant: str) -> str:
    """Return a digest of a tenant's name for files."""
    return hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()


class Estimates:
    """All estimates by drafter and cohort. A cohort belongs to one tenant and is never used for another."""

    def __init__(self) -> None:
        self.drafters: dict[str, PooledEstimate] = {}
        # Restored, unused counts by method, `owner_of` and cohort.
        self.saved: dict[tuple[str, str, str], DraftCounts] = {}
        self.known: OrderedDict[tuple[str, str, str], Estimate] = OrderedDict()

    def of(
        self,
        method: str,
        tenant: str,
        cohort: str,
        coverage: float = PRIOR_COVERAGE,
        published: Sequence[float] = (),
    ) -> Estimate:
        """Return the drafter's estimate for these requests; `coverage` and `published` are its prior."""
        key = (method, tenant, cohort)
        found = self.known.get(key)
        if found is None:
            pooled = self.pooled(method, coverage, published)
            counts = self.saved.pop((method, owner_of(tenant), cohort), None) or DraftCounts()
            pooled.cohorts.setdefault(counts, 0.0)
            found = self.known[key] = Estimate(pooled, cohort, counts)
            while len(self.known) > MAX_ESTIMATES:
                _, oldest = self.known.popitem(last=False)
                oldest.pooled.forget(oldest.counts)
        self.known.move_to_end(key)
        return found

    def pooled(
        self, method: str, coverage: float = PRIOR_COVERAGE, published: Sequence[float] = ()
    ) -> PooledEstimate:
        while len(self.drafters) >= MAX_ESTIMATES and method not in self.drafters:
            del self.drafters[next(iter(self.drafters))]
        found = self.drafters.setdefault(method, PooledEstimate(method))
        found.begin_with(coverage, published)
        return found

    def as_json(self, seconds: float = 0.0) -> dict[str, Any]:
        """Return the newest estimates, decayed to this engine time; tenants are digests."""
        saved = {key: counts.as_json(left_after(seconds)) for key, counts in self.saved.items()}
        known = {
            (method, owner_of(tenant), cohort): one.counts.as_json(one.left(seconds))
            for (method, tenant, cohort), one in self.known.items()
        }
        newest = list({**saved, **known}.items())[-MAX_ESTIMATES:]
        return {"pairs": [[*key, counts] for key, counts in newest]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Start from what `as_json` returned; raise `ValueError` and change nothing for anything else."""
        try:
            found = {
                (str(method), str(owner), str(cohort)): DraftCounts.from_json(value)
                for method, owner, cohort, value in saved["pairs"]
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"saved estimates cannot be read: {error}") from None
        if len(found) > MAX_ESTIMATES:
            raise ValueError("too many saved estimates")
        for (method, _, _), counts in found.items():
            if counts.requests > DEFAULTS.saved_requests:
                counts.fade(DEFAULTS.saved_requests / counts.requests)
            self.pooled(method).cohorts.setdefault(counts, 0.0)
        self.saved = found
