"""Conditions that select the requests of a rule."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

METADATA = "metadata."
"""Prefix of keys that refer to a request's metadata."""

# Keys of a rule by the type of their condition.
TEXTS = ("tenant", "model", "adapter", "priority")
RANGES = ("temperature", "prompt_tokens")
FLAGS = ("json_schema", "stream")

TEMPERATURE_BANDS = ((0.0, "greedy"), (0.5, "low"), (0.9, "medium"))  # maximum temperature of each band
HIGHEST_BAND = "high"


@dataclass(frozen=True)
class RequestTraits:
    """Request properties that rules match."""

    tenant: str = ""
    model: str = ""
    adapter: str = ""  # empty: the base model
    temperature: float = 0.0
    prompt_tokens: int = 0
    json_schema: bool = False  # whether the request prescribes structured output
    stream: bool = False
    priority: str = ""  # the request's priority class
    metadata: Mapping[str, str] = field(default_factory=dict)

    def value(self, key: str) -> str | float | bool | None:
        """Return the value of a rule's key; None: not set."""
        if key.startswith(METADATA):
            return self.metadata.get(key.removeprefix(METADATA))
        value: str | float | bool = getattr(self, key)
        return value

    @property
    def temperature_band(self) -> str:
        return next(
            (name for maximum, name in TEMPERATURE_BANDS if self.temperature <= maximum), HIGHEST_BAND
        )


@dataclass(frozen=True)
class Condition:
    """A condition on one key: patterns, a range or a flag, by the type of the key."""

    key: str
    texts: tuple[str, ...] = ()  # any of these patterns, with * and ?
    low: float | None = None  # inclusive; None: no bound
    high: float | None = None  # exclusive; None: no bound
    flag: bool | None = None

    def holds(self, traits: RequestTraits) -> bool:
        value = traits.value(self.key)
        if self.flag is not None:
            return value is self.flag
        if self.texts:
            return isinstance(value, str) and any(fnmatchcase(value, text) for text in self.texts)
        assert isinstance(value, int | float)
        return (self.low is None or value >= self.low) and (self.high is None or value < self.high)

    @property
    def wanted(self) -> str:
        """Describe the values that satisfy the condition, for messages."""
        if self.flag is not None:
            return str(self.flag).lower()
        if self.texts:
            return " or ".join(self.texts)
        low = "" if self.low is None else f"at least {self.low:g}"
        high = "" if self.high is None else f"below {self.high:g}"
        return " and ".join(part for part in (low, high) if part) or "anything"


@dataclass(frozen=True)
class Match:
    """A conjunction of conditions; without conditions it matches every request."""

    conditions: tuple[Condition, ...] = ()

    def fits(self, traits: RequestTraits) -> bool:
        return all(condition.holds(traits) for condition in self.conditions)

    def first_failing(self, traits: RequestTraits) -> Condition | None:
        """Return the first condition that does not hold."""
        return next((one for one in self.conditions if not one.holds(traits)), None)
