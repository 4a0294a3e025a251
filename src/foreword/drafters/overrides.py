"""What a request may change about speculation: the same check for the library, the engine and the server."""

from collections.abc import Mapping, Set
from typing import Any

from foreword.drafters.config import SpeculationConfig
from foreword.drafters.names import named_methods, split_methods
from foreword.errors import RequestError

SpeculationSetting = Mapping[str, Any] | str | bool | None
"""A request's own: None or True for the engine's default, False for none, a method, or keys of a configuration."""

_LOOKUP_KEYS = frozenset({"prompt_lookup_min", "prompt_lookup_max"})

REQUEST_KEYS = frozenset({"method", "num_speculative_tokens", "max_depth", "fixed"}) | _LOOKUP_KEYS
"""What a request to a server may set. Others (a draft model's path, time limits) are the operator's."""

_LONGEST_LOOKUP = 64


def parse_setting(setting: SpeculationSetting, default: SpeculationConfig | None) -> SpeculationConfig | None:
    """Who drafts for a request with this setting; None: nobody."""
    if setting is None or setting is True:
        return default
    if setting is False:
        return None
    if isinstance(setting, str):
        setting = named_methods(setting)
    if not isinstance(setting, Mapping):
        raise RequestError(
            'speculation must be true, false, a method or an object such as {"method": "ngram"}'
        )
    return SpeculationConfig.parse(setting, default)


def check_request_setting(
    setting: SpeculationSetting, default: SpeculationConfig | None, methods: Set[str]
) -> None:
    """Refuse what a client must not ask of a server that offers these `methods`."""
    if isinstance(setting, str):
        setting = named_methods(setting)
    if isinstance(setting, Mapping):
        for key in setting:
            if key not in REQUEST_KEYS:
                raise RequestError(
                    f"speculation: unknown key {str(key)[:64]!r}; a request may set {', '.join(sorted(REQUEST_KEYS))}"
                )
        if "method" in setting and not _offered(setting["method"], default, methods):
            raise RequestError(
                f"speculation: method must be one of {', '.join(sorted(methods))}; false is for no guessing"
            )
        for key in _LOOKUP_KEYS & setting.keys():
            if isinstance(setting[key], int) and setting[key] > _LONGEST_LOOKUP:
                raise RequestError(f"speculation: {key} can be at most {_LONGEST_LOOKUP}")
    parse_setting(setting, default)


def _offered(method: object, default: SpeculationConfig | None, methods: Set[str]) -> bool:
    """Return whether the server has this method, or drafts with these methods by default."""
    names = split_methods(method)
    return (len(names) == 1 and names[0] in methods) or (default is not None and names == default.method)
