"""Conditions that select the requests of a rule."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

METADATA = "metadata."
"""Prefix of keys that refer to a request's metadata."""

TEXTS = ("tenant", "model", "adapter", "priority")
"""Keys whose condition is a list of patterns; keys that begin with `METADATA` are of this type, too."""

RANGES = ("temperature", "prompt_tokens")
"""Keys whose condition is a range."""

FLAGS = ("json_schema", "stream")
"""Keys whose condition is true or false."""

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
        """Return the request's value of a condition's key; None: not set."""
        if key.startswith(METADATA):
            return self.metadata.get(key.removeprefix(METADATA))
        value: str | float | bool = getattr(self, key)
        return value

    @property
    def temperature_band(self) -> str:
        for maximum, name in TEMPERATURE_BANDS:
            if self.temperature <= maximum:
                return name
        return HIGHEST_BAND


@dataclass(frozen=True)
class Condition:
    """A condition on one key: patterns, a range or a flag, by the type of the key."""

    key: str
    texts: tuple[str, ...] = ()  # patterns with * and ?, one of which the value must match
    low: float | None = None  # inclusive; None: no bound
    high: float | None = None  # exclusive; None: no bound
    flag: bool | None = None

    def holds(self, traits: RequestTraits) -> bool:
        """Return whether a request satisfies the condition."""
        value = traits.value(self.key)
        if self.flag is not None:
            return value is self.flag
        if self.texts:
            return isinstance(value, str) and any(fnmatchcase(value, text) for text in self.texts)
        assert isinstance(value, int | float)
        return (self.low is None or value >= self.low) and (self.high is None or value < self.high)

    @property
    def wanted(self) -> str:
        """Description of the values that satisfy the condition, for messages."""
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
        return self.first_failing(traits) is None

    def first_failing(self, traits: RequestTraits) -> Condition | None:
        """Return the first condition that does not hold; None: all hold."""
        return next((condition for condition in self.conditions if not condition.holds(traits)), None)
