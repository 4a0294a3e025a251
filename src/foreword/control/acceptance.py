"""Expected acceptance of draft tokens: published → pooled → cohort → request, each the prior of the next."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from foreword.control.counts import MOST_LEVELS, DraftCounts
from foreword.control.rates import Rates
from foreword.control.settings import ControlSettings
from foreword.speculation.confidence import CLASSES, MIDDLES

_S = ControlSettings()

PRIOR_RATE, PRIOR_COVERAGE, HEAD_COVERAGE = 0.6, 0.5, 1.0
"""Optimistic priors of an unknown drafter, so that it is tried; one that reads hidden states always has a draft."""

MAX_PAIRS, POOLED_COHORTS = 256, 32
"""Pairs of drafter and cohort that are kept; of a drafter's, the newest make its pooled estimate."""

CHANGE_SLACK, CHANGE_LIMIT = 0.25, 10.0
"""CUSUM of accepted minus expected tokens: tokens per draft that count as noise, and the sum that is a change."""

_SLOW: float = 0.5 ** (1 / _S.half_life_drafts)
_FAST = _SLOW**10  # after a change


def left_after(seconds: float) -> float:
    """Return what is left of counts after this long."""
    left: float = 0.5 ** (seconds / _S.half_life_seconds)
    return left


class PooledEstimate:
    """A drafter's acceptance over all cohorts: the prior of a new cohort, and all that tenants share.

    Every cohort counts as at most a few drafts: cohorts differ about as much as so many drafts do by chance.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self.coverage = PRIOR_COVERAGE  # before anything was counted
        self.published: Sequence[float] = ()  # [level], acceptance that its maker has measured
        self.cohorts: OrderedDict[DraftCounts, float] = (
            OrderedDict()
        )  # engine seconds at which each last decayed
        self._counts: DraftCounts | None = None

    def begin_with(self, coverage: float, published: Sequence[float]) -> None:
        """Set what is expected before anything was counted."""
        if (coverage, published) != (self.coverage, self.published):
            self.coverage, self.published, self._counts = coverage, published, None

    def add(self, counts: DraftCounts) -> None:
        """Add a cohort."""
        self.cohorts.setdefault(counts, 0.0)

    def touch(self, counts: DraftCounts, seconds: float) -> None:
        """Note that a cohort's counts are those of this engine time; a forgotten one may still have requests."""
        if counts in self.cohorts:
            self.cohorts[counts] = seconds
            self.cohorts.move_to_end(counts)
            self._counts = None

    def forget(self, counts: DraftCounts) -> None:
        self.cohorts.pop(counts, None)
        self._counts = None

    @property
    def counts(self) -> DraftCounts:
        """The newest cohorts together; the same object until one of them is decided about again."""
        if self._counts is None:
            self._counts = DraftCounts()
            newest = list(self.cohorts.items())[-POOLED_COHORTS:]
            now = max((seconds for _, seconds in newest), default=0.0)
            for counts, seconds in newest:
                self._counts.add_share(counts, self.cohort_strength, left_after(now - seconds))
        return self._counts

    @property
    def cohort_strength(self) -> float:
        """Pseudo-count of the pooled estimate in a cohort's: a lookup's acceptance differs more between cohorts."""
        return _S.lookup_drafts if self.coverage < HEAD_COVERAGE else _S.cohort_drafts

    @property
    def is_known(self) -> bool:
        """Whether several cohorts have shown what to expect in a new one."""
        return self.counts.asks >= 3 * self.cohort_strength

    def sure_rate(self, sure: int) -> float:
        return self.counts.sure_rate(sure, MIDDLES[sure], _S.prior_drafts)

    def rate(self, level: int, above: float) -> float:
        """Return the acceptance of a level's first node; `above` is that of the level above."""
        if level < len(self.published):
            return self.counts.rate(level, 0, self.published[level], _S.cohort_drafts)
        return self.counts.rate(level, 0, above, _S.prior_drafts)


class PairEstimate:
    """The acceptance of a drafter in one cohort of one tenant."""

    def __init__(self, drafter: PooledEstimate, cohort: str, counts: DraftCounts) -> None:
        self.drafter = drafter
        self.cohort = cohort
        self.counts = counts
        self.changes = 0  # times that the change test has tripped
        self.levels = 0  # that were ever judged, at least
        self.asks = 0  # draft requests ever
        self._depth = 0  # most levels that are requested; 0: unknown
        self._fast_drafts = 0  # drafts that are still forgotten fast
        self._above = self._below = 0.0  # evidence that more, or less, is accepted than expected
        self._seconds = 0.0  # of engine time, when it last decayed
        self._rates: Rates | None = None

    @property
    def method(self) -> str:
        return self.drafter.method

    @property
    def rates(self) -> Rates:
        """What is expected now; the same object until `refresh`."""
        if self._rates is None:
            self._rates = self._estimate()
        return self._rates

    @property
    def is_unsettled(self) -> bool:
        """Whether the traffic is new, or has just changed."""
        return self._fast_drafts > _S.change_drafts // 2 or self.is_new

    @property
    def is_new(self) -> bool:
        return self.counts.asks < _S.new_requests

    @property
    def is_unknown(self) -> bool:
        """Whether there is much to find out: what is new is mostly as it is in other cohorts."""
        return self.is_unsettled and (bool(self._fast_drafts) or not self.drafter.is_known)

    def need(self, depth: int) -> None:
        """Drafts of so many levels will be requested: rates of deeper ones are not worked out."""
        if depth > self._depth:
            self._depth = depth
            self._rates = None

    def refresh(self, seconds: float) -> None:
        """Take into account what was counted since; `seconds` is the engine's time."""
        if seconds > self._seconds:
            self.counts.fade(self.left(seconds))
            self._seconds = seconds
        self.drafter.touch(self.counts, self._seconds)
        self._rates = None

    def left(self, seconds: float) -> float:
        """Return what is left of its counts at this time of the engine's."""
        return left_after(seconds - self._seconds)

    def answered(self, asked_depth: int, depth: int, kept: int | None = None) -> None:
        """Count a draft request, the depth of the draft, and how much of it had a net benefit; 0: there was none."""
        self.asks += 1
        self.counts.answered(asked_depth, depth, depth if kept is None else kept)
        if not depth:
            self.counts.fade(self._fading())

    def judged(self, level: int, children: int, accepted: int | None) -> None:
        """Count a level that was reached; 0 is the first."""
        self.counts.judged(level, children, accepted)

    def finished(self, accepted: int, expected: float) -> None:
        """A draft has been judged to its end: decay the counts, and test for a change."""
        self.levels += accepted or 1
        self.counts.fade(self._fading())
        if self._fast_drafts:
            self._fast_drafts -= 1
            if self._fast_drafts > _S.change_drafts // 2:
                return  # it is still learning what has changed
        off = accepted - expected
        self._above = max(self._above + off - CHANGE_SLACK, 0.0)
        self._below = max(self._below - off - CHANGE_SLACK, 0.0)
        if max(self._above, self._below) > CHANGE_LIMIT:
            self._above = self._below = 0.0
            self._fast_drafts = _S.change_drafts
            self.changes += 1
            self.counts.fade(min(_S.cohort_drafts / max(self.counts.asks, 1.0), 0.25))
            self._rates = None

    def _fading(self) -> float:
        return _FAST if self._fast_drafts else _SLOW

    @property
    def _strength(self) -> float:
        # After a change few drafts of the cohort count: what is expected would else never become what is seen.
        return _S.lookup_drafts if self._fast_drafts else self.drafter.cohort_strength

    def _estimate(self) -> Rates:
        depth = min(self._depth or MOST_LEVELS, MOST_LEVELS)
        accepted, presence = [], []
        above = above_here = PRIOR_RATE
        present = 1.0
        for level in range(depth):
            ranks, pooled = self._ranks(level, above, above_here)
            above, above_here = pooled, ranks[0]
            accepted.append(ranks)
            present = self.drafter.counts.presence(level, present, _S.prior_drafts)
            presence.append(self.counts.presence(level, present, self._strength))
        drafted, coverage = self._coverages(depth)
        sure = [
            self.counts.sure_rate(one, self.drafter.sure_rate(one), self._strength) for one in range(CLASSES)
        ]
        return Rates(accepted, coverage, presence, drafted, sure)

    def _coverages(self, depth: int) -> tuple[list[float], list[float]]:
        """Return [level], of the draft requests: how often there is such a level, and how often with a net benefit."""
        pooled, own = self.drafter.counts.coverages(), self.counts.coverages()
        found: tuple[list[float], list[float]] = [], []
        for which, shares in enumerate(found):
            known, here = self.drafter.coverage, 1.0
            for level in range(depth):
                known = _shrunk(pooled[level][which], pooled[level][2], known, _S.prior_drafts)
                here = min(_shrunk(own[level][which], own[level][2], known, self._strength), here)
                shares.append(here)
        return found

    def _ranks(self, level: int, above: float, above_here: float) -> tuple[list[float], float]:
        """Return the rates of siblings, and the first one's pooled rate; `above` is that of the level above."""
        own, pooled = self.counts, self.drafter.counts
        known = self.drafter.rate(level, above)
        prior = known
        if (
            level >= len(own.reached) and above > 0
        ):  # unseen here: differs from the pooled rate as the level above does
            prior = min(known * above_here / above, 1.0)
        ranks, before = [own.rate(level, 0, prior, self._strength)], known
        for rank in range(1, max(pooled.ranks(level), own.ranks(level))):
            one = pooled.rate(level, rank, (1 - before) / 2, _S.prior_drafts)
            before += one
            ranks.append(own.rate(level, rank, one, self._strength))
        return ranks, known


def _shrunk(part: float, whole: float, prior: float, strength: float) -> float:
    return (strength * prior + part) / (strength + whole)


def owner_of(tenant: str) -> str:
    """Return a tenant's name in files: only who knows the tenant finds it again."""
    return hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()


class Estimates:
    """All pairs of drafter and cohort. A cohort belongs to one tenant: nothing of it shows in another's."""

    def __init__(self) -> None:
        self.drafters: dict[str, PooledEstimate] = {}
        self.saved: dict[
            tuple[str, str, str], DraftCounts
        ] = {}  # by method, `owner_of` and cohort: restored, unused
        self.pairs: OrderedDict[tuple[str, str, str], PairEstimate] = OrderedDict()

    def pair(
        self,
        method: str,
        tenant: str,
        cohort: str,
        coverage: float = PRIOR_COVERAGE,
        published: Sequence[float] = (),
    ) -> PairEstimate:
        """Return the drafter's estimate for these requests; `coverage` and `published` rates are its prior."""
        key = (method, tenant, cohort)
        found = self.pairs.get(key)
        if found is None:
            drafter = self.drafter(method, coverage, published)
            counts = self.saved.pop((method, owner_of(tenant), cohort), None) if self.saved else None
            found = self.pairs[key] = PairEstimate(drafter, cohort, counts or DraftCounts())
            drafter.add(found.counts)
            while len(self.pairs) > MAX_PAIRS:
                _, oldest = self.pairs.popitem(last=False)
                oldest.drafter.forget(oldest.counts)
        self.pairs.move_to_end(key)
        return found

    def drafter(
        self, method: str, coverage: float = PRIOR_COVERAGE, published: Sequence[float] = ()
    ) -> PooledEstimate:
        while len(self.drafters) >= MAX_PAIRS and method not in self.drafters:
            del self.drafters[next(iter(self.drafters))]
        found = self.drafters.setdefault(method, PooledEstimate(method))
        found.begin_with(coverage, published)
        return found

    def as_json(self, seconds: float = 0.0) -> dict[str, Any]:
        """Return the newest pairs as they have decayed at this engine time; tenants are digests."""
        saved = {key: counts.as_json(left_after(seconds)) for key, counts in self.saved.items()}
        pairs = {
            (method, owner_of(tenant), cohort): pair.counts.as_json(pair.left(seconds))
            for (method, tenant, cohort), pair in self.pairs.items()
        }
        newest = list({**saved, **pairs}.items())[-MAX_PAIRS:]
        return {"pairs": [[*key, counts] for key, counts in newest]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Begin with what `as_json` has written; raises `ValueError` and changes nothing for anything else."""
        try:
            pairs = {
                (str(method), str(owner), str(cohort)): DraftCounts.from_json(value)
                for method, owner, cohort, value in saved["pairs"]
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no estimates: {error}") from None
        if len(pairs) > MAX_PAIRS:
            raise ValueError("more estimates than are ever kept")
        for (method, _, _), counts in pairs.items():
            if counts.asks > _S.saved_requests:
                counts.fade(_S.saved_requests / counts.asks)
            self.drafter(method).add(counts)
        self.saved = pairs
