"""Which requests a rule is for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

METADATA = "metadata."
"""What the keys begin with that look at a request's metadata."""

TEXTS = ("tenant", "model", "adapter", "priority")
RANGES = ("temperature", "prompt_tokens")
FLAGS = ("json_schema", "stream")

TEMPERATURE_BANDS = ((0.0, "greedy"), (0.5, "low"), (0.9, "medium"))
HOTTEST = "high"


@dataclass(frozen=True)
class RequestTraits:
    """What rules look at."""

    tenant: str = ""
    model: str = ""
    adapter: str = ""  # empty: the model itself
    temperature: float = 0.0
    prompt_tokens: int = 0
    json_schema: bool = False  # whether the answer's form is prescribed
    stream: bool = False
    priority: str = ""  # the class that the request says it is of
    metadata: Mapping[str, str] = field(default_factory=dict)

    def value(self, key: str) -> str | float | bool | None:
        """What a rule's key stands for; None: the request does not say."""
        if key.startswith(METADATA):
            return self.metadata.get(key.removeprefix(METADATA))
        found: str | float | bool = getattr(self, key)
        return found

    @property
    def temperature_band(self) -> str:
        return next((name for most, name in TEMPERATURE_BANDS if self.temperature <= most), HOTTEST)


@dataclass(frozen=True)
class Condition:
    """One key of a rule, with the texts, the range or the flag that it asks for."""

    key: str
    texts: tuple[str, ...] = ()  # any of these, with * and ?
    low: float | None = None
    high: float | None = None  # the range does not contain it
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
        """For people."""
        if self.flag is not None:
            return str(self.flag).lower()
        if self.texts:
            return " or ".join(self.texts)
        low = "" if self.low is None else f"at least {self.low:g}"
        high = "" if self.high is None else f"below {self.high:g}"
        return " and ".join(part for part in (low, high) if part) or "anything"


@dataclass(frozen=True)
class Match:
    """All of its conditions must hold; without any it is for everybody."""

    conditions: tuple[Condition, ...] = ()

    def fits(self, traits: RequestTraits) -> bool:
        return all(condition.holds(traits) for condition in self.conditions)

    def why_not(self, traits: RequestTraits) -> Condition | None:
        """The first condition that does not hold."""
        return next((one for one in self.conditions if not one.holds(traits)), None)
