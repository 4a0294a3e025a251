"""The drafters of an engine: made once, shared, told what ends, closed."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import Lock

from foreword.acceptance.rules.rule import Rule, check_exact
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.overrides import SpeculationSetting, parse_setting
from foreword.errors import RequestError
from foreword.speculation.drafting import Drafter, DrafterNeeds, added_memory, all_faults, close_all, needs_of
from foreword.speculation.requests import DraftPlan, StepRequest, as_drafter_sees

MAX_DRAFTERS = 16
"""Drafters that are kept at hand; the one that was asked for longest ago is let go for another."""

Build = Callable[[SpeculationConfig], Drafter]


class DrafterPool:
    """Makes each drafter when the first request asks for it, and shares it among all who ask for the same.

    It is the only owner: whoever else holds a drafter only asks it. One that is let go is closed when the last of
    its requests has ended.
    """

    def __init__(
        self,
        build: Build,
        rule: Rule,
        default: SpeculationConfig | None = None,
        brought: Iterable[Drafter] = (),
    ) -> None:
        """`brought` are drafters that a policy uses for everyone."""
        self._build = build
        self._rule = rule
        self._brought = list(brought)
        self._drafters: dict[str, Drafter] = {}  # at hand, by configuration; the newest last
        self._users: Counter[int] = Counter()  # requests that have not ended, by id() of their drafter
        self._leaving: dict[int, Drafter] = {}  # let go of, by id(), while requests still use them
        self._lock = Lock()  # requests come from any thread
        self._building = Lock()
        self.provided: DrafterNeeds | None = None  # what the engine can give a drafter; None: not known yet
        self.default: DraftPlan | None = None  # of requests that don't say
        self._default_config: SpeculationConfig | None = None
        self.set_default(default)

    def set_default(self, config: SpeculationConfig | None) -> None:
        """Who drafts for requests that don't say; None: nobody. The one before is let go."""
        before = None if self._default_config is None else _key(self._default_config)
        self.default = None if config is None else self._get(config)
        self._default_config = config
        if before is not None and (config is None or before != _key(config)):
            with self._lock:
                self._let_go(before)

    def resolve(self, setting: SpeculationSetting) -> DraftPlan | None:
        """Who drafts for a request with this setting; see `SpeculationConfig.parse`."""
        config = parse_setting(setting, self._default_config)
        return (
            self.default if config is self._default_config else None if config is None else self._get(config)
        )

    def is_ready(self, setting: SpeculationSetting) -> bool:
        """Whether `resolve` would answer at once, without making a drafter."""
        config = parse_setting(setting, self._default_config)
        with self._lock:
            return config is None or _key(config) in self._drafters

    def begin(self, request: StepRequest) -> None:
        """A request that may ask its drafter from now on."""
        if request.speculation is not None:
            with self._lock:
                self._users[id(request.speculation.drafter)] += 1

    def end(self, request: StepRequest) -> None:
        """The request has ended: whoever drafted for it drops what it keeps of it. Once for every `begin`."""
        seen = as_drafter_sees(request)
        try:
            for drafter in request.asked.values():
                drafter.forget(seen)
        finally:
            if request.speculation is not None:
                self._end_use(request.speculation.drafter)

    def _end_use(self, drafter: Drafter) -> None:
        with self._lock:
            self._users[id(drafter)] -= 1
            if self._users[id(drafter)] > 0:
                return
            del self._users[id(drafter)]
            left = self._leaving.pop(id(drafter), None)
        if left is not None:
            close_all([left])

    def memory_bytes(self) -> int | None:
        """Of all drafters."""
        return added_memory(self._all())

    def fault_counts(self) -> Counter[str]:
        """What went wrong with drafters and cost only their guesses."""
        return all_faults(self._all())

    def close(self) -> None:
        """Nobody asks any more."""
        close_all(self._all())
        with self._lock:
            self._drafters.clear()
            self._leaving.clear()

    def _all(self) -> list[Drafter]:
        with self._lock:
            return [*self._brought, *self._drafters.values(), *self._leaving.values()]

    def _get(self, config: SpeculationConfig) -> DraftPlan:
        check_exact(self._rule, is_chain=not config.makes_trees)
        key = _key(config)
        with (
            self._building
        ):  # apart from the books, which the engine's thread reads while a drafter is being made
            with self._lock:
                drafter = self._drafters.pop(key, None)
            drafter = drafter or self._made(config)
            with self._lock:
                self._drafters[key] = drafter
                self._make_room()
        most = config.num_speculative_tokens
        return DraftPlan(
            "+".join(config.method), drafter, most, config.max_depth or most, config.disable_by_batch_size
        )

    def _made(self, config: SpeculationConfig) -> Drafter:
        drafter = self._build(config)
        rows = needs_of(drafter).rows
        if self.provided is not None and not set(rows) <= set(self.provided.rows):
            close_all([drafter])
            raise RequestError(
                f"speculation: {'+'.join(config.method)} keeps rows of its own in the KV pages, which were laid out "
                "without them; name it when the engine is started"
            )
        return drafter

    def _make_room(self) -> None:
        """Of too many drafters let those go that nobody asked for longest; never the default."""
        kept = None if self._default_config is None else _key(self._default_config)
        for key in [key for key in self._drafters if key != kept]:
            if len(self._drafters) <= MAX_DRAFTERS:
                return
            self._let_go(key)

    def _let_go(self, key: str) -> None:
        drafter = self._drafters.pop(key, None)
        if drafter is None:
            return
        if self._users[id(drafter)]:
            self._leaving[id(drafter)] = drafter
        else:
            close_all([drafter])


def _key(config: SpeculationConfig) -> str:
    """The same for configurations that one drafter can serve: sizes are a matter of each ask."""
    return json.dumps(
        replace(config, num_speculative_tokens=1, max_depth=None, disable_by_batch_size=None).as_mapping(),
        sort_keys=True,
    )
