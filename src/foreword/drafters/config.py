"""The speculation configuration: one JSON object, and the keys that a request may change."""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.drafters.combined import FallbackDrafter, MergedDrafter, RoutedDrafter
from foreword.drafters.guard import CallerThread, GuardedDrafter
from foreword.drafters.heads.loading import method_of
from foreword.drafters.names import named_methods, split_methods
from foreword.drafters.registry import DrafterResources, TokenSelection, as_drafter, drafter_kinds
from foreword.errors import ForewordError, RequestError
from foreword.speculation.drafting import Drafter, DraftSource

COMBINATIONS = ("first", "merge", "route")


@dataclass(frozen=True)
class SpeculationConfig:
    """Drafters and draft sizes: `{"method": "ngram", "num_speculative_tokens": 5, ...}`, as in vLLM."""

    method: tuple[str, ...]  # one drafter, or several to combine
    num_speculative_tokens: int = 5  # maximum draft tokens per request and pass: chain length or tree nodes
    max_depth: int | None = None  # maximum tree depth; None: limited by the nodes only
    disable_by_batch_size: int | None = None  # no drafts while at least this many requests run
    fixed: bool = False  # draft exactly `num_speculative_tokens` in every step; False: the policy decides
    # Several methods: "first" non-empty draft, "merge" into one tree, or "route" to the one with the highest gain.
    combine: str = "first"
    draft_timeout: float = 1.0  # seconds to wait for a plug-in's draft
    options: tuple[tuple[str, Any], ...] = ()  # drafter-specific settings

    @staticmethod
    def parse(
        value: "str | Mapping[str, Any]", base: "SpeculationConfig | None" = None
    ) -> "SpeculationConfig":
        """Parse JSON text or an object, and check every key and value.

        - Without a method, or with the methods of `base`, all keys of `base` are inherited.
        - With another list of methods, only the options of those that `base` has, too, are inherited.
        - Without a method and without `base`, the files named by `model` determine the method.
        """
        given = _as_mapping(value)
        if base is not None:
            methods = split_methods(given.get("method", list(base.method)))
            inherited = base.as_mapping() if methods == base.method else base._options_of(methods)
            given = {**inherited, **given}
        if "method" not in given and isinstance(given.get("model"), str):
            given = {**given, "method": method_of(given["model"])}
        if "method" not in given:
            raise RequestError(
                f"speculation: give a method, one of {', '.join(drafter_kinds())}; "
                "there is no default whose keys could be changed"
            )
        common = {key: given[key] for key in _COMMON_KEYS if key in given and key != "method"}
        options = tuple((key, value) for key, value in given.items() if key not in _COMMON_KEYS)
        config = SpeculationConfig(split_methods(given["method"]), **common, options=options)
        for name in config.method:
            config.settings_of(name)
        return config

    def __post_init__(self) -> None:
        kinds = drafter_kinds()
        if not self.method or len(set(self.method)) != len(self.method):
            raise RequestError("speculation: method must be a drafter's name or a list of different names")
        for name in self.method:
            if name not in kinds:
                raise RequestError(
                    f"speculation: there is no method {name!r}; there are {', '.join(kinds)}; false: no speculation"
                )
            if kinds[name].defect:
                raise RequestError(f"speculation: {kinds[name].defect}")
        _check_nodes("num_speculative_tokens", self.num_speculative_tokens)
        if self.max_depth is not None:
            _check_nodes("max_depth", self.max_depth)
        batch = self.disable_by_batch_size
        if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool) or batch < 2):
            raise RequestError(f"speculation: disable_by_batch_size must be at least 2, not {batch!r}")
        if self.combine not in COMBINATIONS:
            allowed = ", ".join(map(repr, COMBINATIONS))
            raise RequestError(f"speculation: combine must be one of {allowed}, not {self.combine!r}")
        if not isinstance(self.fixed, bool):
            raise RequestError(f"speculation: fixed must be true or false, not {self.fixed!r}")
        if not isinstance(self.draft_timeout, int | float) or not self.draft_timeout > 0:
            raise RequestError(f"speculation: draft_timeout must be positive, not {self.draft_timeout!r}")
        option_names = _option_names(self.method)
        for key, _ in self.options:
            if key not in option_names:
                allowed = ", ".join(sorted(option_names | set(_COMMON_KEYS)))
                raise RequestError(f"speculation: unknown key {key!r}; known are {allowed}")

    def methods_of(self, kind: DraftSource) -> list[str]:
        """Return the methods whose drafters are of this kind."""
        return [name for name in self.method if drafter_kinds()[name].traits.kind is kind]

    @property
    def drafter_key(self) -> str:
        """Identifies the drafter: configurations that differ only in draft sizes or the batch limit share one."""
        same_sizes = replace(
            self, num_speculative_tokens=1, max_depth=None, disable_by_batch_size=None, fixed=False
        )
        return json.dumps(same_sizes.as_mapping(), sort_keys=True)

    @property
    def makes_trees(self) -> bool:
        """Whether a draft may have several tokens at one position."""
        return self._is_merged or any(map(self._makes_trees, self.method))

    @property
    def fixes_trees(self) -> bool:
        """Whether neither the shapes of trees nor the selection of their nodes depends on sampled tokens.

        The nodes of a merged tree have no q and count as chosen, which is exact.
        """
        ranked = [name for name in self.method if drafter_kinds()[name].selection is TokenSelection.RANKED]
        return self._is_merged or not any(map(self._makes_trees, ranked))

    @property
    def _is_merged(self) -> bool:
        return len(self.method) > 1 and self.combine == "merge"

    def _makes_trees(self, name: str) -> bool:
        return drafter_kinds()[name].makes_trees(self.settings_of(name))

    def as_mapping(self) -> dict[str, Any]:
        """Return the object from which `parse` restores this configuration."""
        common: dict[str, Any] = {key: getattr(self, key) for key in _COMMON_KEYS}
        return common | {"method": list(self.method)} | dict(self.options)

    def build(self, resources: DrafterResources) -> Drafter:
        """Create the drafter, guarded against its faults."""
        drafters = [self._build_one(name, resources) for name in self.method]
        if len(drafters) == 1:
            return drafters[0]
        if self.combine == "route":
            return RoutedDrafter(dict(zip(self.method, drafters, strict=True)))
        return FallbackDrafter(drafters) if self.combine == "first" else MergedDrafter(drafters)

    def _build_one(self, name: str, resources: DrafterResources) -> Drafter:
        kind = drafter_kinds()[name]
        try:
            drafter = as_drafter(kind.build(self.settings_of(name), resources))
        except ForewordError:
            raise
        except Exception as error:  # a plug-in may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(f"speculation: {name} cannot be made with these settings: {reason}") from error
        # An abandoned thread must not write KV pages: drafters with rows there are called in the caller's thread.
        needs_thread = kind.can_hang and not drafter.traits.needs.uses_pages
        return GuardedDrafter(drafter, name, CallerThread(name, self.draft_timeout) if needs_thread else None)

    def _options_of(self, methods: Sequence[str]) -> dict[str, Any]:
        """Return the options that belong to these methods, of those that this configuration has."""
        names = _option_names(name for name in methods if name in self.method)
        return {key: value for key, value in self.options if key in names}

    def settings_of(self, name: str) -> Any:  # noqa: ANN401 - a drafter's settings class
        """Return the settings of one of the methods; raise `RequestError` for an invalid option."""
        return drafter_kinds()[name].configure(self._options_of([name]))


# Keys that do not depend on the method.
_COMMON_KEYS = tuple(field.name for field in fields(SpeculationConfig) if field.name != "options")


def _option_names(methods: Iterable[str]) -> set[str]:
    """Return the option keys of these methods."""
    return {field.name for name in methods for field in fields(drafter_kinds()[name].settings)}


def _as_mapping(value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RequestError(f"speculation is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise RequestError(
            'speculation must be a method\'s name, true, false or an object such as {"method": "ngram"}'
        )
    return value


def _check_nodes(name: str, value: object) -> None:
    """Raise `RequestError` unless the value is a possible number of draft nodes."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_DRAFT_NODES:
        raise RequestError(f"speculation: {name} must be in 1 .. {MAX_DRAFT_NODES}, not {value!r}")


SpeculationSetting = Mapping[str, Any] | str | bool | None
"""A request's setting: None or True for the engine's default, False for none, a method, or configuration keys."""

_LOOKUP_KEYS = frozenset({"prompt_lookup_min", "prompt_lookup_max"})

REQUEST_KEYS = frozenset({"method", "num_speculative_tokens", "max_depth", "fixed"}) | _LOOKUP_KEYS
"""Keys that a request to a server may set; others, such as a draft model's path, are the operator's."""

_LONGEST_LOOKUP = 64  # maximum match length that a request may set


def parse_setting(setting: SpeculationSetting, default: SpeculationConfig | None) -> SpeculationConfig | None:
    """Return the configuration of a request with this setting; None: no speculation."""
    if setting is None or setting is True:
        return default
    if setting is False:
        return None
    if isinstance(setting, str):
        setting = named_methods(setting)
    return SpeculationConfig.parse(setting, default)


def check_request_setting(
    setting: SpeculationSetting, default: SpeculationConfig | None, methods: Set[str]
) -> None:
    """Raise `RequestError` if a client may not use this setting on a server that offers `methods`."""
    if isinstance(setting, str):
        setting = named_methods(setting)
    if isinstance(setting, Mapping):
        for key in setting:
            if key not in REQUEST_KEYS:
                raise RequestError(
                    f"speculation: unknown key {str(key)[:64]!r}; a request may set {', '.join(sorted(REQUEST_KEYS))}"
                )
        names = split_methods(setting.get("method"))
        is_offered = len(names) == 1 and names[0] in methods
        is_default = default is not None and names == default.method
        if "method" in setting and not is_offered and not is_default:
            raise RequestError(
                f"speculation: method must be one of {', '.join(sorted(methods))}; false is for no speculation"
            )
        for key in _LOOKUP_KEYS & setting.keys():
            if isinstance(setting[key], int) and setting[key] > _LONGEST_LOOKUP:
                raise RequestError(f"speculation: {key} can be at most {_LONGEST_LOOKUP}")
    parse_setting(setting, default)
