"""Pretend traffic for policies: scripted texts, drafters that are right as often as they are told, costs by formula."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import exp, log
from types import SimpleNamespace
from typing import Any

from foreword.acceptance.rules.rule import Rule
from foreword.backends.batch import Tap
from foreword.control.service import DEFAULT_SERVICE
from foreword.control.trim import Offer, choose
from foreword.control.value import Pass
from foreword.kv.sequence import KvSequence
from foreword.speculation.acceptance_stats import AcceptanceStats
from foreword.speculation.confidence import Stop, class_of
from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.drafting import NO_NEEDS, Drafter, DrafterNeeds, DraftSource, Traits
from foreword.speculation.measured.situation import Situation
from foreword.speculation.protocols import Policy
from foreword.speculation.report import DrafterCall, RequestReport, StageSeconds, StepReport
from foreword.speculation.requests import DrafterView, DraftPlan, PassEntry, Verdict

LENGTH, MOOD = 240, 40
WRONG = 1000


def interpolated(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """A cost curve in seconds through points of (rows, milliseconds), straight between and after them."""

    def seconds(rows: int) -> float:
        for (x0, y0), (x1, y1) in pairwise(points):
            if rows <= x1 or (x1, y1) == points[-1]:
                return (y0 + (y1 - y0) * (rows - x0) / (x1 - x0)) / 1000
        raise AssertionError

    return seconds


CPU = interpolated([(1, 6.7), (2, 6.7), (4, 8.9), (8, 15.3), (16, 29.7), (32, 56.2), (64, 110.0)])
"""A small model on two cores: from a few rows on every row costs the same."""

TWO_CORES = interpolated(
    [
        (1, 7.0),
        (2, 7.4),
        (3, 7.9),
        (4, 9.0),
        (5, 11.1),
        (6, 12.2),
        (8, 15.0),
        (16, 29.7),
        (64, 110.0),
        (512, 800),
    ]
)
"""A small model on two ARM cores: the fifth row needs another tile."""

H200 = interpolated([(1, 6.0), (32, 6.4), (64, 7.0), (128, 8.6), (256, 12.5), (512, 21.0)])
"""An 8B model on a GPU: the first rows are nearly free."""


@dataclass(frozen=True)
class Kind:
    """Requests of one cohort: how likely a guess is, how much that differs, how often there is one."""

    rate: float
    coverage: float = 1.0
    spread: float = 0.5  # of requests, in log odds
    mood: float = 0.5  # of passages, in log odds


LOOKUP = {
    "code": Kind(0.75, 0.5),
    "extract": Kind(0.85, 0.7),
    "chat": Kind(0.4, 0.12),
    "creative": Kind(0.3, 0.08),
}
HEAD = {"code": Kind(0.8), "extract": Kind(0.85), "chat": Kind(0.65), "creative": Kind(0.55)}


@dataclass(frozen=True)
class PretendDrafter(Drafter):
    """What a drafter costs, in seconds, and how it does by cohort."""

    name: str
    kinds: dict[str, Kind]
    call: float = 0.0
    ask: float = 0.0
    level: float = 0.0
    row: float = 0.0  # for every level of every request
    tell: float = 0.0  # for every request that it is told of, whether or not it is asked
    depth: int = 8
    behind: float = 0.0  # for every token that it has to catch up with
    needs: DrafterNeeds = NO_NEEDS
    acceptance_by_level: tuple[float, ...] = ()  # as its maker says
    knows: float = 0.0  # how much single guesses differ, in log odds; 0: all are alike, and it does not say
    says: bool = True  # whether it says how sure it is
    stops: bool = False  # whether it ends drafts where going on is not worth it

    @cached_property
    def traits(self) -> Traits:  # type: ignore[override]
        kind = DraftSource.HEAD if self.needs.taps else DraftSource.LOOKUP
        return Traits(kind, self.needs, stops_itself=self.stops, acceptance_by_level=self.acceptance_by_level)

    def seconds(self, levels: int, asks: int, behind: int = 0) -> float:
        rows = self.row * levels * asks
        return self.call + self.ask * asks + self.level * levels + rows + self.behind * behind


def lookup(name: str = "lookup", **kinds: Kind) -> PretendDrafter:
    return PretendDrafter(name, {**LOOKUP, **kinds}, call=0.15e-3, ask=0.05e-3)


def head(per_level: float = 0.5e-3) -> PretendDrafter:
    return PretendDrafter("head", HEAD, level=per_level)


def states_head(
    per_level: float = 0.6e-3, acceptance: tuple[float, ...] = (), **kinds: Kind
) -> PretendDrafter:
    """One that reads the target's states: with a prompt it begins a step later than a lookup, and has to catch up."""
    needs = DrafterNeeds(taps=(Tap(1),))
    return PretendDrafter(
        "eagle",
        {**HEAD, **kinds},
        call=0.6e-3,
        level=per_level,
        depth=5,
        behind=0.05e-3,
        needs=needs,
        acceptance_by_level=acceptance,
    )


class PretendRequest:
    """A text of which everything is known: also which guesses will be right."""

    def __init__(
        self, number: int, cohort: str, drafters: Sequence[PretendDrafter], tenant: str = "", prompt: int = 1
    ) -> None:
        rng = random.Random(number)
        self.request_id, self.cohort = number, cohort
        self.tokens = [0] * prompt
        self.prompt_len = prompt
        self.drafter_view = DrafterView(prompt, tenant)
        self.is_read = prompt == 1
        self.readers: set[str] = set()  # heads that have read the prompt along
        self.last_asked: dict[str, int] = {}  # by drafter, tokens after the step in which it was asked
        self.length = LENGTH
        self.script = [rng.randrange(WRONG) for _ in range(LENGTH + 20)]
        self.sampler = SimpleNamespace(rule=Rule.COUPLED)
        self.acceptance = AcceptanceStats()
        self.kv = KvSequence()
        self.prompt_logprobs, self.scored = None, 0
        self._luck = {one.name: rng.gauss(0, 1) for one in drafters}
        self._moods = {one.name: [rng.gauss(0, 1) for _ in range(LENGTH // MOOD + 2)] for one in drafters}
        self.speculation: DraftPlan | None = None
        self.step_limit: float | None = None
        self.service = DEFAULT_SERVICE
        self.adapter_slot = 0
        self.seconds, self.counted = 0.0, 0  # of its steps without prompts, and tokens in them
        self.drafters = {one.name: one for one in drafters}

    @property
    def room(self) -> int:
        return self.length - self.place

    @property
    def place(self) -> int:
        """In its text; 1 is the first token that is generated."""
        return len(self.tokens) - self.prompt_len + 1

    def rate(self, drafter: PretendDrafter) -> float:
        kind = drafter.kinds[self.cohort]
        mood = self._moods[drafter.name][self.place // MOOD]
        odds = log(kind.rate / (1 - kind.rate)) + kind.spread * self._luck[drafter.name] + kind.mood * mood
        if drafter.needs and self.prompt_len > 1 and drafter.name not in self.readers:
            odds -= 1.0  # a head without the prompt
        return 1 / (1 + exp(-odds))

    def draft(self, drafter: PretendDrafter, depth: int, stop: Stop | None = None) -> Draft:
        """The same guesses for the same place, whoever asks."""
        place = self.place
        rng = random.Random(hash((self.request_id, place, len(drafter.name))))
        if rng.random() >= drafter.kinds[self.cohort].coverage or (drafter.needs and not self.is_read):
            return NO_DRAFT
        rate = self.rate(drafter)
        if drafter.knows:
            return self._sure_draft(drafter, min(depth, self.room), stop, rate, rng)
        tokens = [
            self.script[place + level] if rng.random() < rate else WRONG for level in range(drafter.depth)
        ]
        return Draft.chain(tokens[: min(depth, self.room)], len(self.tokens))

    def _sure_draft(
        self, drafter: PretendDrafter, depth: int, stop: Stop | None, rate: float, rng: random.Random
    ) -> Draft:
        tokens, sure, chance = [], [], 1.0
        for level in range(depth):
            own = 1 / (1 + exp(-log(rate / (1 - rate)) - drafter.knows * rng.gauss(0, 1)))
            tokens.append(self.script[self.place + level] if rng.random() < own else WRONG)
            sure.append(own)
            if stop is not None:
                chance *= stop.rates[class_of(own)]
                if level < len(stop.least) and chance < stop.least[level]:
                    break
        return Draft.chain(tokens, len(self.tokens), confidence=sure if drafter.says else ())

    def missed(self, method: str) -> int:
        """Tokens that came since the drafter was asked, or read along; a head keeps the states of the newest."""
        return min(len(self.tokens) - self.last_asked.get(method, 0), 64)

    def commit(self, draft: Draft) -> Verdict:
        accepted = 0
        for token in draft.tokens:
            if token != self.script[self.place + accepted]:
                break
            accepted += 1
        fresh = tuple(self.script[self.place : self.place + accepted + 1])
        self.tokens += fresh
        self.is_read = True
        return Verdict(tuple(range(accepted)), fresh, draft=draft)


@dataclass
class Run:
    """Tokens and seconds of a run, and what plain decoding would have taken for the same tokens."""

    tokens: int = 0
    seconds: float = 0.0
    plain: float = 0.0
    steps: list[tuple[float, float]] = field(default_factory=list)  # (plain seconds, seconds) of each step

    answers: dict[bool, list[float]] = field(
        default_factory=lambda: {True: [], False: []}
    )  # seconds per token of those that have ended, by whether they are plain

    @property
    def ratio(self) -> float:
        return self.plain / self.seconds

    def note(self, requests: Sequence[PretendRequest], report: StepReport) -> None:
        """What a step was to those in it."""
        for request, part in zip(requests, report.requests, strict=True):
            request.seconds += report.seconds.total
            request.counted += len(part.verdict.tokens)
            if request.room <= 0:
                self.answers[request.speculation is None].append(request.seconds / request.counted)


@dataclass
class Traffic:
    """A closed loop of requests on a target with a cost curve."""

    curve: Callable[[int], float]
    drafters: Sequence[PretendDrafter]
    batch: int
    cohorts: Sequence[str] = ("code", "extract", "chat", "creative")
    noise: float = 0.03
    seed: int = 0
    prompt: int = 1  # tokens of every prompt
    length: int = LENGTH  # tokens of every answer
    has_own_tenants: bool = False  # whether every request belongs to another
    plain: float = 0.0  # share of the requests that nobody may guess for
    plan_of: Callable[[PretendRequest], DraftPlan] | None = None

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._number = 10_000 * (self.seed + 1)
        self.situation = Situation()
        self.taken = 0  # shadow drafts that were verified
        for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512):
            self.situation.costs.begin_with(0, [(rows, 0.95 * self.curve(rows))])
        self.running: list[PretendRequest] = []

    def run(self, policy: Policy, tokens: int) -> Run:
        """At least this many tokens, of the same requests whatever the policy does."""
        most, found = tokens, Run()
        while found.tokens < most:
            self._fill()
            report = self._step(policy)
            tokens = sum(len(part.verdict.tokens) for part in report.requests)
            plain = tokens * self.curve(len(self.running)) / len(self.running)
            if report.decodes_only:
                found.note(self.running, report)
            self.running = [request for request in self.running if request.room > 0]
            if not report.decodes_only:
                continue  # prompts take as long whatever is guessed
            found.tokens += tokens
            found.seconds += report.seconds.total
            found.plain += plain
            found.steps.append((plain, report.seconds.total))
        return found

    def _fill(self) -> None:
        del self.running[self.batch :]
        while len(self.running) < self.batch:
            self._number += 1
            cohort = random.Random(self._number).choice(self.cohorts)
            tenant = f"tenant {self._number}" if self.has_own_tenants else ""
            request = PretendRequest(self._number, cohort, self.drafters, tenant, self.prompt)
            request.length = self.length
            plain = sum(other.speculation is None for other in self.running)
            request.speculation = None if plain < self.plain * self.batch else self._plan(request)
            self.running.append(request)

    def _plan(self, request: PretendRequest) -> DraftPlan:
        if self.plan_of is not None:
            return self.plan_of(request)
        drafter = Drafter()
        drafter.choices = {one.name: one for one in self.drafters}
        return DraftPlan("route", drafter, 64, max(one.depth for one in self.drafters))

    def _step(self, policy: Policy) -> StepReport:
        entries = [self._entry(request) for request in self.running]
        plans = policy.plan(entries, self.situation)
        calls, drafts = [], [NO_DRAFT] * len(entries)
        by_method: dict[str, list[int]] = {}
        taken = self._shadows(plans, calls)
        for place, plan in enumerate(plans):
            if place in taken:
                drafts[place] = taken[place]
            elif plan is not None and plan.max_nodes and self.running[place].room > 1:
                by_method.setdefault(plan.method, []).append(place)
        cost = {}
        for method, places in by_method.items():
            drafter = self.running[places[0]].drafters[method]
            chosen = {place: plan for place in places if (plan := plans[place]) is not None}
            levels = max(min(plan.max_depth, plan.max_nodes) for plan in chosen.values())
            for place, plan in chosen.items():
                depth = min(plan.max_depth, plan.max_nodes, self.running[place].room - 1)
                drafts[place] = self.running[place].draft(drafter, depth, plan.stop)
            if all(plan.stop is not None for plan in chosen.values()):
                levels = max(1, *(len(drafts[place]) for place in places))
            behind = sum(plan.lag for plan in chosen.values())
            missed = sum(self.running[place].missed(method) for place in places)
            is_silent = not any(len(drafts[place]) for place in places) and drafter.needs
            seconds = 0.0 if is_silent else drafter.seconds(levels, len(places), missed) * self._noisy()
            calls.append(
                DrafterCall(
                    method, len(places), 0, levels, 0, seconds, behind, is_observing=bool(drafter.needs)
                )
            )
            cost[method] = seconds / len(places)
        kept = policy.trim(entries, drafts, self.situation) if calls else drafts
        rows = sum(entry.run for entry in entries) + sum(map(len, kept))
        drafting = sum(call.seconds for call in calls)
        telling = self._telling(policy)
        total = self.curve(rows) * self._noisy() + drafting + telling
        parts = []
        for entry, request, plan, draft in zip(entries, self.running, plans, kept, strict=True):
            method = plan.method if plan is not None and plan.max_nodes and request.room > 1 else ""
            asked = plan
            if len(parts) in taken and plan is not None and plan.shadow is not None:
                asked = plan.shadow.plan
                method = asked.method
            if plan is not None and not request.is_read:
                request.readers.add(plan.method)
            verdict = request.commit(draft)
            if asked is not None:
                request.last_asked[asked.method] = len(request.tokens)
            draft_seconds = cost.get(method, 0.0)
            parts.append(
                RequestReport(
                    request,  # type: ignore[arg-type]
                    verdict,
                    entry.run,
                    entry.computed,
                    True,
                    method,
                    draft_seconds,
                )
            )
        report = StepReport(parts, calls, StageSeconds(drafting, 0.0, telling, total, telling))
        self.situation.learn(report)
        self.situation.count(report)
        policy.learn(report)
        return report

    def _shadows(self, plans: Sequence[DraftPlan | None], calls: list[DrafterCall]) -> dict[int, Draft]:
        """A call of its own for each: dearer than in the engine, where it may share one. Drafts that are taken."""
        taken: dict[int, Draft] = {}
        for place, (request, plan) in enumerate(zip(self.running, plans, strict=True)):
            if plan is not None and plan.shadow is not None and request.room > 1:
                other = plan.shadow.plan
                drafter, levels = request.drafters[other.method], min(other.max_depth, request.room - 1)
                draft = request.draft(drafter, levels)
                if plan.shadow.keep(draft):
                    taken[place] = draft.within(plan.max_nodes, min(plan.max_depth, request.room - 1))
                seconds = drafter.seconds(levels, 1, request.missed(other.method)) * self._noisy()
                calls.append(DrafterCall(other.method, 1, 0, levels, 0, seconds, other.lag))
                request.last_asked[other.method] = len(request.tokens)
        self.taken += len(taken)
        return taken

    def _telling(self, policy: Policy) -> float:
        tells = getattr(policy, "notifies", lambda request: False)
        told = sum(request.speculation is not None and tells(request) for request in self.running)
        return told * sum(drafter.tell for drafter in self.drafters)

    def _entry(self, request: PretendRequest) -> PassEntry:
        run = 1 if request.is_read else request.prompt_len
        return PassEntry(request, request.kv, len(request.tokens) - run, run, 0, True)  # type: ignore[arg-type]

    def _noisy(self) -> float:
        return exp(self._rng.gauss(0, self.noise))


class Oracle:
    """Knows every rate and every cost; decides by the same arithmetic."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._table = [traffic.curve(max(rows, 1)) for rows in range(1200)]
        self._spent = 0.0
        self._asked: dict[int, PretendDrafter] = {}

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        here = Pass.of(len(entries), len(entries), self._table)
        best, best_rate, self._asked, self._spent = [], len(entries) / here.plain, {}, 0.0
        for drafter in self._traffic.drafters:
            ranked = sorted(entries, key=lambda entry: -self._value(entry.request, drafter))  # type: ignore[arg-type]
            requests: list[Any] = [entry.request for entry in ranked]
            by_depth = [self._rates(here, requests, drafter, depth + 1) for depth in range(drafter.depth)]
            for count in sorted(
                {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64} & set(range(len(entries) + 1)) | {len(entries)}
            ):
                for depth, rates in enumerate(by_depth, start=1):
                    if rates[count - 1] > best_rate:
                        best = [(request.request_id, drafter, depth) for request in requests[:count]]
                        best_rate, self._spent = rates[count - 1], drafter.seconds(depth, count)
        self._asked = {number: drafter for number, drafter, _ in best}
        depths = {number: depth for number, _, depth in best}
        return [
            DraftPlan(self._asked[number].name, None, 64, depths[number])  # type: ignore[arg-type]
            if (number := entry.request.request_id) in self._asked
            else None
            for entry in entries
        ]

    def _value(self, request: PretendRequest, drafter: PretendDrafter) -> float:
        rate = request.rate(drafter)
        return drafter.kinds[request.cohort].coverage * rate / (1 - rate)

    def _rates(
        self, here: Pass, asked: Sequence[PretendRequest], drafter: PretendDrafter, depth: int
    ) -> list[float]:
        """Of tokens, for the first request alone, the first two, and so on.

        Every draft is verified as far as that is worth it on its own.
        """
        tokens, rows, waits, per_token = float(here.drawn), 0.0, here.plain, here.per_token
        found = []
        for count, request in enumerate(asked, start=1):
            rate, coverage = request.rate(drafter), drafter.kinds[request.cohort].coverage
            survival, before = 1.0, here.after(rows)
            for level in range(depth):
                survival *= rate
                after = here.after(rows + level + 1)
                if survival * per_token < after - before:
                    break
                tokens += coverage * survival
                waits += coverage * (after - before)
                before = after
            rows += coverage * depth
            found.append(tokens / (waits + drafter.seconds(depth, count)))
        return found

    def trim(
        self, entries: Sequence[PassEntry], drafts: Sequence[Draft], situation: Situation
    ) -> list[Draft]:
        here = Pass.of(len(entries), len(entries), self._table)
        places = [place for place, draft in enumerate(drafts) if len(draft)]
        offers = []
        for place in places:
            request: Any = entries[place].request
            rate = request.rate(self._asked[request.request_id])
            survival = [rate ** (level + 1) for level in range(len(drafts[place]))]
            offers.append(Offer(request.request_id, drafts[place], survival))
        kept = list(drafts)
        if offers:
            for place, draft in zip(places, choose(offers, here, self._spent), strict=True):
                kept[place] = draft
        return kept

    def rows_wanted(self, requests: Sequence[Any], situation: Situation, beside: int = 1) -> int:
        return 0

    def learn(self, report: StepReport) -> None:
        pass

    def drafters(self) -> list[Any]:
        return []
