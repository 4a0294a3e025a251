"""What a request may change about guessing: checked here, because that depends on the server."""

from collections.abc import Mapping
from typing import Any

from foreword.drafters.config import SpeculationConfig
from foreword.engine.messages import SpeculationSetting
from foreword.errors import RequestError
from foreword.server.errors import ApiError
from foreword.server.settings import FREE_METHODS, ServerSettings

_LOOKUP_KEYS = frozenset({"prompt_lookup_min", "prompt_lookup_max"})
_KEYS = frozenset({"method", "num_speculative_tokens", "max_depth"}) | _LOOKUP_KEYS
"""What a request may set. Others (a draft model's path, timeouts) are the operator's."""

_LONGEST_LOOKUP = 64


def check_speculation(
    override: bool | Mapping[str, Any] | None, settings: ServerSettings
) -> SpeculationSetting:
    """The override as the engine takes it, or 400."""
    if override is None or isinstance(override, bool):
        return override
    for key in override:
        if key not in _KEYS:
            raise _refusal(f"unknown key {key[:64]!r}; a request may set {', '.join(sorted(_KEYS))}")
    if "method" not in override and settings.default_method is None:
        raise _refusal(f"name a method: {', '.join(sorted(settings.methods))}")
    asked = {"method": settings.default_method, **override}
    method = asked["method"]
    if not isinstance(method, str) or method not in settings.methods:
        raise _refusal(f"method must be one of {', '.join(sorted(settings.methods))}")
    if method != "ngram" and (lookup := _LOOKUP_KEYS & asked.keys()):
        raise _refusal(f"{min(lookup)} is for ngram, not for {method}")
    for key in _LOOKUP_KEYS & asked.keys():
        if isinstance(asked[key], int) and asked[key] > _LONGEST_LOOKUP:
            raise _refusal(f"{key} can be at most {_LONGEST_LOOKUP}")
    # A drafter with a model keeps the settings that the server gave it; how far it guesses is all there is to check.
    _try(asked if method in FREE_METHODS else asked | {"method": "ngram"})
    return dict(override)  # without a method, the engine changes only these keys of the server's own setting


def _try(asked: Mapping[str, Any]) -> None:
    try:
        SpeculationConfig.parse(dict(asked)).makes_trees  # noqa: B018 - reads, and so checks, the drafter's settings
    except RequestError as error:
        raise _refusal(str(error).removeprefix("speculation: ")) from None


def _refusal(message: str) -> ApiError:
    return ApiError(400, f"speculation: {message}", param="speculation")
