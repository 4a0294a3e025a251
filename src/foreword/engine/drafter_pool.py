"""The drafters that an engine has at hand, and which of them a request gets."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock

from foreword.acceptance.rules.rule import Rule, check_exact
from foreword.drafters.config import SpeculationConfig
from foreword.engine.messages import SpeculationSetting
from foreword.errors import RequestError
from foreword.speculation.protocols import Drafter, Speculation, added_memory, all_faults

MOST_DRAFTERS = 16
"""Drafters that are kept at hand; the one that was asked for longest ago is let go for another."""

Build = Callable[[SpeculationConfig], Drafter]


class DrafterRack:
    """Makes each drafter when the first request asks for it, and shares it among all who ask for the same.

    One that is let go lives on until the last of its requests ends.
    """

    def __init__(self, build: Build, rule: Rule, default: SpeculationConfig | None = None) -> None:
        self._build = build
        self._rule = rule
        self._drafters: dict[str, Drafter] = {}
        self._lock = Lock()  # requests come from any thread
        self._building = Lock()
        self.default: Speculation | None = None  # of requests that don't say
        self._default_config: SpeculationConfig | None = None
        self.set_default(default)

    def set_default(self, config: SpeculationConfig | None) -> None:
        """Who drafts for requests that don't say; None: nobody. The one before is let go."""
        before = None if self._default_config is None else _key(self._default_config)
        self.default = None if config is None else self._get(config)
        self._default_config = config
        if before is not None and (config is None or before != _key(config)):
            with self._lock:
                self._drafters.pop(before, None)

    def resolve(self, setting: SpeculationSetting) -> Speculation | None:
        """Who drafts for a request with this wish.

        A wish without a method, or with the default's own, changes only the keys that it names.
        """
        if setting is None or setting is True:
            return self.default
        if setting is False:
            return None
        if not isinstance(setting, Mapping):
            raise RequestError('speculation must be true, false or an object such as {"method": "ngram"}')
        if "method" in setting and not self._is_default_method(setting["method"]):
            return self._get(SpeculationConfig.parse(setting))
        if self._default_config is None:
            raise RequestError(
                "speculation: give a method; this engine has no default whose keys could be changed"
            )
        return self._get(SpeculationConfig.parse({**self._default_config.as_mapping(), **setting}))

    def _is_default_method(self, method: object) -> bool:
        """Then what else the default was given, a model's path for one, need not be said again."""
        named = [method] if isinstance(method, str) else method
        return self._default_config is not None and named == list(self._default_config.method)

    def memory_bytes(self) -> int | None:
        """Of all drafters at hand."""
        with self._lock:
            return added_memory(self._drafters.values())

    def fault_counts(self) -> Counter[str]:
        """What went wrong with drafters and cost only their guesses."""
        with self._lock:
            return all_faults(self._drafters.values())

    def _get(self, config: SpeculationConfig) -> Speculation:
        check_exact(self._rule, is_chain=not config.makes_trees)
        key = _key(config)
        with (
            self._building
        ):  # apart from the books, which the engine's thread reads while a drafter is being made
            with self._lock:
                drafter = self._drafters.pop(key, None)
            drafter = drafter or self._build(config)
            with self._lock:
                self._drafters[key] = drafter  # the newest last
                self._let_go()
        most = config.num_speculative_tokens
        return Speculation("+".join(config.method), drafter, most, config.max_depth or most)

    def _let_go(self) -> None:
        """Of too many drafters those that nobody asked for longest; never the default."""
        kept = None if self._default_config is None else _key(self._default_config)
        for key in [key for key in self._drafters if key != kept]:
            if len(self._drafters) <= MOST_DRAFTERS:
                return
            del self._drafters[key]


def _key(config: SpeculationConfig) -> str:
    """The same for configurations that one drafter can serve: sizes are a matter of each ask."""
    return json.dumps(replace(config, num_speculative_tokens=1, max_depth=None).as_mapping(), sort_keys=True)
