"""The drafters by name: what each declares, how it is made, and those that other packages add."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, auto
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from foreword.backends.interface import Decoder
from foreword.cluster.shared_nodes import SharedNodes
from foreword.drafters.names import ENTRY_POINTS, OWN_METHODS
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import Checkpoint
from foreword.speculation.drafting import NO_NEEDS, Drafter, DraftSource, Traits


@dataclass(frozen=True)
class DrafterResources:
    """The target and its files, for drafters that need them."""

    target: Decoder  # the loaded target
    checkpoint: Checkpoint  # its files
    encode: Callable[[str], list[int]]  # text to token ids, without special tokens
    load_decoder: Callable[[Checkpoint], Decoder]  # another model, on the target's device and backend
    vocab_size: int  # ids that the target can draw; a drafter drafts no others
    nodes: SharedNodes = field(default_factory=SharedNodes)  # that drafters made from this are connected to


class Guesses(Enum):
    """How draft tokens come about: what *traversal* has to know of a drafter's trees."""

    CHOSEN = auto()  # from the text alone: nothing is drawn
    DRAWN = auto()  # drawn, in trees whose shape is fixed before
    RANKED = auto()  # drawn, with their q, and ranked or left out by what was drawn


@dataclass(frozen=True)
class NoSettings:
    """Settings of a drafter without any."""


@dataclass(frozen=True)
class DrafterKind:
    """A drafter in the registry: what it is, its settings and how it is made."""

    summary: str  # one line for listings
    settings: type  # a frozen dataclass; its fields are the keys that a user may set
    build: Callable[[Any, DrafterResources], Any]  # (settings, resources) -> drafter
    makes_trees: Callable[[Any], bool] = lambda settings: False  # whether its drafts may branch
    # Whether its calls need a thread with a time limit, which costs a quarter of a millisecond.
    can_hang: bool = True
    guesses: Guesses = Guesses.RANKED  # the default allows trees under *coupled* only
    defect: str = ""  # why it cannot be used; empty: it can
    traits: Traits = field(default_factory=Traits)  # as far as they do not depend on settings
    # (settings, resources, tokens of its KV cache) -> drafter, where the model of a draft node is itself the drafter.
    build_on_node: Callable[[Any, DrafterResources, int], Drafter] | None = None

    def configure(self, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of the type `settings`
        """Return the settings with these values; refuse a value of the wrong type by name."""
        kinds = {one.name: one.type for one in fields(self.settings)}
        for one in fields(self.settings):
            if one.default is MISSING and one.name not in values:
                raise RequestError(f"speculation: this method needs {one.name!r} ({self.summary})")
        for name, value in values.items():
            expected = _TYPES.get(str(getattr(kinds[name], "__name__", kinds[name])))
            is_wrong = expected is not None and not isinstance(value, expected)
            if is_wrong or (isinstance(value, bool) and expected not in (None, bool)):
                raise RequestError(f"speculation: {name} must be {_NAMES[expected]}, not {value!r}")
        return self.settings(**values)


_TYPES: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
_NAMES: dict[Any, str] = {
    int: "a whole number",
    (int, float): "a number",
    str: "a string",
    bool: "true or false",
}


def is_wide(settings: Any) -> bool:  # noqa: ANN401 - settings with a `tree_width`
    """Return whether a drafter with these settings makes trees."""
    return bool(settings.tree_width > 1)


chosen_kind = partial(DrafterKind, can_hang=False, guesses=Guesses.CHOSEN)
"""A drafter of this package that chooses its tokens from texts."""

drawn_kind = partial(DrafterKind, makes_trees=is_wide, can_hang=False, guesses=Guesses.DRAWN)
"""A drafter of this package that draws its tokens, in trees where its `tree_width` is above 1."""


@cache
def drafter_kinds() -> Mapping[str, DrafterKind]:
    """Return all kinds by method name. Another package cannot take the name of a built-in drafter.

    Installed packages are searched once: that takes longer than a step, and every request may need the result.
    """
    kinds: dict[str, DrafterKind] = {
        name: EntryPoint(name, path, ENTRY_POINTS).load() for name, path in OWN_METHODS.items()
    }
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name not in kinds:
            kinds[entry.name] = _load(entry)
    return MappingProxyType(kinds)


def _load(entry: EntryPoint) -> DrafterKind:
    """Return another package's kind; one that cannot be loaded is refused only when it is requested."""
    try:
        kind = entry.load()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return _broken(f"drafter {entry.name!r} of {entry.value} cannot be loaded: {reason}")
    if not isinstance(kind, DrafterKind):
        return _broken(f"drafter {entry.name!r}: {entry.value} is not a DrafterKind")
    return kind


def _broken(reason: str) -> DrafterKind:
    def refuse(*_: object) -> Any:  # noqa: ANN401 - it never returns
        raise RequestError(reason)

    return DrafterKind("cannot be loaded", NoSettings, refuse, defect=reason)


_METHODS = (
    *("propose", "observe", "anticipate", "expect", "forget"),
    *("memory_bytes", "fault_counts", "nodes", "close"),
)


class PlugIn(Drafter):
    """A drafter that has only some of the interface: `propose`, and what else it needs, under the documented names."""

    def __init__(self, own: Any) -> None:  # noqa: ANN401 - of another package
        needs = getattr(own, "needs", NO_NEEDS)
        self._own = own
        self.choices = getattr(own, "choices", {})
        self.traits = Traits(
            DraftSource.HEAD if needs.taps else DraftSource.LOOKUP,
            needs,
            starts_early=bool(getattr(own, "anticipates", False)),
            stops_itself=bool(getattr(own, "stops", False)),
            expects_requests=bool(getattr(own, "expects", False)),
            may_be_absent=bool(getattr(own, "may_be_absent", False)),
            acceptance_by_level=getattr(own, "acceptance_by_level", ()),
        )
        for name in _METHODS:
            if (method := getattr(own, name, None)) is not None:
                setattr(self, "draft_early" if name == "anticipate" else name, method)

    @property
    def absent(self) -> tuple[str, ...]:
        """The names that the drafter itself reports."""
        names: tuple[str, ...] = getattr(self._own, "absent", ())
        return names


def as_drafter(made: Any) -> Drafter:  # noqa: ANN401 - a drafter, or something with its methods
    """Return a drafter with the declared interface."""
    return made if isinstance(made, Drafter) else PlugIn(made)
