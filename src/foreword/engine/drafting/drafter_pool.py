"""Creates, shares and closes the engine's drafters."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from operator import or_
from threading import Lock

from foreword.acceptance.rules.rule import Rule, check_exact
from foreword.backends.batch import check_taps
from foreword.drafters.config import SpeculationConfig, SpeculationSetting, parse_setting
from foreword.engine.drafting.known_answers import (
    NO_HINTS,
    AnswerHints,
    HintedDrafter,
    PooledChoices,
    drafters_of,
    hinted,
    parts_of,
)
from foreword.errors import RequestError
from foreword.kv.spare_rows import SpareRows
from foreword.speculation.drafting import (
    NO_NEEDS,
    Drafter,
    DrafterNeeds,
    NodeReport,
    added_memory,
    all_faults,
    all_node_reports,
    close_all,
)
from foreword.speculation.requests import DraftPlan, StepRequest, draft_request_of


def needs_of_all(default: DraftPlan | None, others: Sequence[Drafter]) -> DrafterNeeds:
    """Return the combined needs of the drafters that exist from the start."""
    drafters = [*others, *([] if default is None else [default.drafter])]
    return reduce(or_, [drafter.traits.needs for drafter in drafters], NO_NEEDS)


MAX_DRAFTERS = 16  # number of cached drafters; the least recently requested one is released first

Build = Callable[[SpeculationConfig], Drafter]


class PagesLackRows(RequestError):  # noqa: N818 - names the problem
    """A drafter needs rows in the KV pages, but the pages were laid out without them."""


class DrafterPool:
    """Creates each drafter on first use and shares it between requests with the same configuration.

    The pool alone owns drafters. A released drafter is closed when the last of its requests has ended.
    """

    def __init__(
        self,
        build: Build | None,
        rule: Rule,
        default: SpeculationConfig | None = None,
        policy_drafters: Iterable[Drafter] = (),
        num_layers: int | None = None,
        spare_rows: SpareRows | None = None,
    ) -> None:
        """`policy_drafters` belong to the policy and serve all requests; without `build` no others are created."""
        self._build = build
        self._spare_rows = spare_rows or SpareRows()
        self._rule = rule
        self.num_layers = num_layers  # of the target; None: unknown
        self._policy_drafters = list(policy_drafters)
        self._drafters: dict[str, Drafter] = {}  # by configuration, least recently used first
        self._users: Counter[int] = Counter()  # active requests by the drafter's id()
        self._blocks = 0  # number of active `keep_all_open` blocks
        # Combinations of the pool's drafters, by names (if any) and id() of these.
        self._combined: dict[tuple[str | int, ...], HintedDrafter | PooledChoices] = {}
        self._leaving: dict[int, Drafter] = {}  # released drafters by id(), closed when unused
        self._lock = Lock()  # protects all of the above, since requests come from any thread
        self._building = Lock()  # held while a drafter is created
        # Needs that the engine supplies; None: not determined yet
        self.supplied_needs: DrafterNeeds | None = None
        self._kept: set[str] = set()  # configurations that are never released
        self._is_closed = False
        self.default: DraftPlan | None = None  # plan of requests without a setting; None: no drafter
        self.default_config: SpeculationConfig | None = None  # configuration of its drafter
        self.set_default(default)

    def set_default(self, config: SpeculationConfig | None) -> None:
        """Set the drafter of requests that name none (None: no drafter), and release the previous one."""
        old_key = None if self.default_config is None else self.default_config.drafter_key
        self.default = None if config is None else self._plan_of(config)
        self.default_config = config
        if old_key is not None and (config is None or old_key != config.drafter_key):
            with self._lock:
                self._release_drafter(old_key)

    def keep(self, configs: Iterable[SpeculationConfig]) -> None:
        """Never release the drafters of these configurations, however many others are requested.

        Of those kept until now, release the heads in spare rows, which the next head may need.
        """
        with self._lock:
            before, self._kept = self._kept, {config.drafter_key for config in configs}
            self._release_spare_heads(before)

    def create_early(self, config: SpeculationConfig) -> Drafter:
        """Return the drafter of this configuration, created now for later requests."""
        return self._plan_of(config).drafter

    def resolve(self, setting: SpeculationSetting, hints: AnswerHints = NO_HINTS) -> DraftPlan | None:
        """Return the draft plan of a request with this setting (None: no drafter); see `SpeculationConfig.parse`.

        The plan's drafter is created if the pool does not have it.
        """
        config = parse_setting(setting, self.default_config)
        plan = self.default
        if config is not self.default_config:
            plan = None if config is None else self._plan_of(config)
        return self.with_hints(plan, setting, hints)

    def with_hints(
        self, plan: DraftPlan | None, setting: SpeculationSetting, hints: AnswerHints
    ) -> DraftPlan | None:
        """Return a plan that first calls the drafters of the request's prediction and grammar, then those of `plan`."""
        for config in self._hint_configs(setting, hints, is_speculating=plan is not None):
            plan = self._combine(self._plan_of(config), plan)
        return plan

    def choice_of(self, configs: Mapping[str, SpeculationConfig]) -> DraftPlan:
        """Return a plan that lets the policy choose between these drafters, keyed by the given names."""
        plans = {name: self._plan_of(config) for name, config in configs.items()}
        if len(plans) == 1:
            ((name, plan),) = plans.items()
            return replace(plan, method=name)
        with self._lock:
            key: tuple[str | int, ...] = (*plans, *(id(plan.drafter) for plan in plans.values()))
            choices = PooledChoices({name: plan.drafter for name, plan in plans.items()})
            drafter = self._combined.setdefault(key, choices)
        most = max(plan.max_nodes for plan in plans.values())
        depth = max(plan.max_depth for plan in plans.values())
        return DraftPlan("+".join(plans), drafter, most, depth)

    def is_ready(self, setting: SpeculationSetting, hints: AnswerHints = NO_HINTS) -> bool:
        """Return whether `resolve` would create no drafter."""
        config = parse_setting(setting, self.default_config)
        wanted = [] if config is None else [config]
        wanted += self._hint_configs(setting, hints, is_speculating=config is not None)
        with self._lock:
            return all(config.drafter_key in self._drafters for config in wanted)

    def _hint_configs(
        self, setting: SpeculationSetting, hints: AnswerHints, is_speculating: bool
    ) -> list[SpeculationConfig]:
        """Return the drafters that follow the request's hints; empty if the engine creates no drafters."""
        return [] if setting is False or self._build is None else hints.configs(is_speculating)

    def _combine(self, first: DraftPlan, plan: DraftPlan | None) -> DraftPlan:
        """Return a plan that calls `first` and then the drafter of `plan`."""
        if plan is None:
            return first
        if plan.drafter is first.drafter:
            return replace(first, is_fixed=plan.is_fixed)
        if first.drafter in parts_of(plan.drafter):
            return plan
        with self._lock:
            key = (id(first.drafter), id(plan.drafter))
            drafter = self._combined.setdefault(key, hinted(first, plan.drafter))
        most, depth = max(first.max_nodes, plan.max_nodes), max(first.max_depth, plan.max_depth)
        return DraftPlan(f"{first.method}+{plan.method}", drafter, most, depth, is_fixed=plan.is_fixed)

    @contextmanager
    def keep_all_open(self) -> Iterator[None]:
        """Close no drafter within the block: between `resolve` and `hold`, no request holds its drafter open."""
        with self._lock:
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                unused_keys = [] if self._blocks else [key for key in self._leaving if not self._users[key]]
                unused = [self._leaving.pop(key) for key in unused_keys]
            close_all(unused)

    def hold(self, request: StepRequest) -> None:
        """Keep a request's drafters open until `release` or `end`; call once per request, within `keep_all_open`."""
        with self._lock:
            self._users.update(map(id, drafters_of(request.speculation)))

    def release(self, request: StepRequest) -> None:
        """Release the drafters of a request that is not queued."""
        for drafter in drafters_of(request.speculation):
            self._end_use(drafter)

    def begin(self, request: StepRequest) -> None:
        """Announce a queued request to those of its drafters that have the trait `expects_requests`."""
        for drafter in drafters_of(request.speculation):
            if drafter.traits.expects_requests:
                request.drafter_view.notified[id(drafter)] = drafter  # so that it is notified of the end
                drafter.expect(draft_request_of(request))

    def end(self, request: StepRequest) -> None:
        """Notify drafters of a request's end and release them; call once for every `hold`."""
        draft_request = draft_request_of(request)
        try:
            for drafter in request.drafter_view.notified.values():
                drafter.forget(draft_request)
        finally:
            self.release(request)

    def _end_use(self, drafter: Drafter) -> None:
        """Subtract one user of a drafter; close it if it was released and has no user left."""
        with self._lock:
            self._users[id(drafter)] -= 1
            if self._users[id(drafter)] > 0:
                return
            del self._users[id(drafter)]
            self._release_spare_heads([key for key, other in self._drafters.items() if other is drafter])
            is_unused = not self._blocks and self._leaving.pop(id(drafter), None) is not None
        if is_unused:
            close_all([drafter])

    def memory_bytes(self) -> int | None:
        """Return the bytes that drafters need in addition to the target; None: none reports its memory."""
        return added_memory(self._all())

    def created_by(self, config: SpeculationConfig) -> list[Drafter]:
        """Return the drafter of this configuration as a list; empty if it was released."""
        with self._lock:
            drafter = self._drafters.get(config.drafter_key)
        return [] if drafter is None else [drafter]

    def fault_counts(self) -> Counter[str]:
        return all_faults(self._all())

    def nodes(self) -> list[NodeReport]:
        return all_node_reports(self._all())

    def close(self) -> None:
        """Close all drafters and refuse new ones."""
        self._is_closed = True
        close_all(self._all())
        with self._lock:
            self._drafters.clear()
            self._leaving.clear()

    def _all(self) -> list[Drafter]:
        with self._lock:
            return [*self._policy_drafters, *self._drafters.values(), *self._leaving.values()]

    def _plan_of(self, config: SpeculationConfig) -> DraftPlan:
        """Return the plan of a configuration; create its drafter if the pool does not have it."""
        check_exact(self._rule, is_chain=not config.makes_trees, is_fixed=config.fixes_trees)
        key = config.drafter_key
        drafter = self._cached(key)
        if drafter is None:
            # A separate lock: the engine's thread reads the cache while a drafter is being created.
            with self._building:
                drafter = self._cached(key)  # another thread may have created it
                if drafter is None:  # not `or`: a drafter with length 0 is falsy
                    drafter = self._create(config)
                with self._lock:
                    self._drafters[key] = drafter
                    self._release_oldest()
        most = config.num_speculative_tokens
        return DraftPlan(
            "+".join(config.method),
            drafter,
            most,
            config.max_depth or most,
            config.disable_by_batch_size,
            config.fixed,
        )

    def _cached(self, key: str) -> Drafter | None:
        """Return the cached drafter of this configuration and mark it as most recently used."""
        with self._lock:
            drafter = self._drafters.pop(key, None)
            if drafter is not None:
                self._drafters[key] = drafter
            return drafter

    def _create(self, config: SpeculationConfig) -> Drafter:
        """Return a new drafter that this engine can supply; raise `RequestError` if it cannot."""
        name = "+".join(config.method)
        if self._build is None:
            raise RequestError(f"this engine cannot make drafters, so method {name!r} is not available")
        self._offer_spare_rows()
        drafter = self._build(config)
        try:
            self._check(drafter, name)
        except RequestError:
            close_all([drafter])
            raise
        return drafter

    def _check(self, drafter: Drafter, name: str) -> None:
        """Raise `RequestError` if the engine cannot supply the drafter's needs, or is closed."""
        needs = drafter.traits.needs
        if self._is_closed:
            raise RequestError("the engine is closed")
        if self.num_layers is not None:
            try:
                check_taps(needs.taps, self.num_layers)
            except ValueError as error:
                raise RequestError(f"speculation: {name} does not fit this model: {error}") from None
        if self.supplied_needs is not None and not set(needs.rows) <= set(self.supplied_needs.rows):
            raise PagesLackRows(
                f"speculation: {name} keeps rows of its own in the KV pages, which were laid out without them; "
                "name it when the engine is started"
            )

    def _offer_spare_rows(self) -> None:
        """Let the next drafter use the free spare rows; without any, release heads that no request uses."""
        if not self._spare_rows.offer(needs_of_all(None, self._all()).rows):
            with self._lock:
                unused = [key for key, drafter in self._drafters.items() if not self._users[id(drafter)]]
                self._release_spare_heads(unused)
            self._spare_rows.offer(needs_of_all(None, self._all()).rows)

    def _release_spare_heads(self, keys: Iterable[str]) -> None:
        """Release those of these drafters that are heads in spare rows, and neither the default nor kept."""
        for key, drafter in [(key, self._drafters[key]) for key in keys if key in self._drafters]:
            if self._spare_rows.has(drafter.traits.needs.rows) and key in self._releasable():
                self._release_drafter(key)

    def _release_oldest(self) -> None:
        """Release the least recently requested drafters beyond the limit; never the default, kept or newest one."""
        for key in self._releasable()[:-1][: max(len(self._drafters) - MAX_DRAFTERS, 0)]:
            self._release_drafter(key)

    def _releasable(self) -> list[str]:
        """Return the keys of the drafters that are neither the default nor kept, least recently requested first."""
        default = None if self.default_config is None else self.default_config.drafter_key
        return [key for key in self._drafters if key != default and key not in self._kept]

    def _release_drafter(self, key: str) -> None:
        """Remove the drafter with this cache key, and its combinations; close it when no request uses it."""
        drafter = self._drafters.pop(key, None)
        if drafter is None:
            return
        for drafters, combined in list(self._combined.items()):
            if any(part is drafter for part in parts_of(combined)):
                del self._combined[drafters]
        if self._users[id(drafter)] or self._blocks:
            self._leaving[id(drafter)] = drafter
        else:
            close_all([drafter])
