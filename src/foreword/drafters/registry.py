"""The registry of drafters: settings, traits and factories, including those of other packages."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, auto
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.backends.interface import Decoder
from foreword.cluster.shared_nodes import SharedNodes
from foreword.drafters.names import ENTRY_POINTS, OWN_METHODS
from foreword.errors import RequestError
from foreword.kv.spare_rows import SpareRows
from foreword.models.formats.checkpoint import Checkpoint
from foreword.speculation.drafting import NO_NEEDS, Drafter, DraftSource, Traits
from foreword.speculation.settings import HELP, DrafterSettings, Limit, setting


@dataclass(frozen=True)
class DrafterResources:
    """The target and its files, for drafters that need them."""

    target: Decoder  # the loaded target
    checkpoint: Checkpoint  # its files
    encode: Callable[[str], list[int]]  # text -> token ids, without special tokens
    load_decoder: Callable[[Checkpoint], Decoder]  # loads another model on the target's device and backend
    vocab_size: int  # ids that the target can sample; drafters use no others
    # Connections to draft nodes, shared by the drafters of one engine.
    nodes: SharedNodes = field(default_factory=SharedNodes)
    spare_rows: SpareRows = field(default_factory=SpareRows)  # of the engine's pages, for heads


class TokenSelection(Enum):
    """How a drafter selects its tokens. *traversal* verifies only trees of CHOSEN and DRAWN tokens."""

    CHOSEN = auto()  # from text, without sampling
    DRAWN = auto()  # sampled, in trees of a fixed shape
    RANKED = auto()  # sampled with q, then ranked or dropped by the result


@dataclass(frozen=True)
class DrafterKind:
    """A registry entry: description, settings and factory of a drafter."""

    summary: str  # one line for listings
    settings: type  # a frozen dataclass; its fields are the user's keys
    build: Callable[[Any, DrafterResources], Any]  # (settings, resources) -> drafter
    makes_trees: Callable[[Any], bool] = lambda settings: False  # settings -> whether drafts may branch
    can_hang: bool = True  # call it in a thread with a time limit, which costs 0.25 ms per call
    selection: TokenSelection = TokenSelection.RANKED  # the default allows trees only under *coupled*
    defect: str = ""  # why it cannot be used; empty: it can
    traits: Traits = field(default_factory=Traits)  # the traits that do not depend on settings
    # (settings, resources, KV cache tokens) -> drafter, for methods that can draft with a draft node's own model.
    build_on_node: Callable[[Any, DrafterResources, int], Drafter] | None = None

    def configure(self, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of the type `settings`
        """Return settings with these values; raise `RequestError` for a missing value or a wrong type."""
        for option in fields(self.settings):
            if option.default is MISSING and option.name not in values:
                help_text = option.metadata.get(HELP) or self.summary
                raise RequestError(f"speculation: this method needs {option.name!r} ({help_text})")
        types = {option.name: option.type for option in fields(self.settings)}
        for name, value in values.items():
            # A dataclass field's type is a class or, with postponed annotations, its name.
            expected = _TYPES.get(str(getattr(types[name], "__name__", types[name])))
            is_wrong = expected is not None and not isinstance(value, expected)
            # In Python, True and False are also integers.
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


def tree_width() -> Any:  # noqa: ANN401
    """Return the settings field `tree_width` of drafters that draft a chain or a tree."""
    limit = Limit(f"in 1 .. {MAX_DRAFT_NODES}", lambda value: 1 <= value <= MAX_DRAFT_NODES)
    return setting(1, "candidates per draft level; 1: a chain", limit)


Build = Callable[[Any, DrafterResources], Drafter]


def chosen_kind(
    drafter: Any,  # noqa: ANN401 - a subclass of Drafter
    summary: str,
    settings: type = DrafterSettings,
    build: Build | None = None,
    **more: Any,  # noqa: ANN401 - other fields of DrafterKind
) -> DrafterKind:
    """Return the entry of a built-in drafter that chooses tokens from texts, with the traits of its class.

    Without `build`, the drafter is created from its settings, or from nothing if it has none.
    """
    has_settings = settings is not DrafterSettings
    make = build or (lambda config, _: drafter(config) if has_settings else drafter())
    options = {"can_hang": False, "selection": TokenSelection.CHOSEN, "traits": drafter.traits}
    return DrafterKind(summary, settings, make, **options | more)


drawn_kind = partial(
    chosen_kind, makes_trees=lambda settings: settings.tree_width > 1, selection=TokenSelection.DRAWN
)
"""Return the entry of a built-in drafter that samples tokens, in trees if `tree_width` is above 1."""


@cache
def drafter_kinds() -> Mapping[str, DrafterKind]:
    """Return the registry entries by method name; cached, since searching packages takes longer than a step."""
    kinds: dict[str, DrafterKind] = {
        name: EntryPoint(name, path, ENTRY_POINTS).load() for name, path in OWN_METHODS.items()
    }
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name not in kinds:  # a built-in drafter cannot be replaced
            kinds[entry.name] = _load(entry)
    return MappingProxyType(kinds)


def _load(entry: EntryPoint) -> DrafterKind:
    """Return the entry of another package; a broken one is refused only when a configuration names it."""
    try:
        kind = entry.load()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        defect = f"drafter {entry.name!r} of {entry.value} cannot be loaded: {reason}"
    else:
        if isinstance(kind, DrafterKind):
            return kind
        defect = f"drafter {entry.name!r}: {entry.value} is not a DrafterKind"
    return DrafterKind("cannot be loaded", DrafterSettings, lambda *_: None, defect=defect)


_METHODS = ("propose", "observe", "expect", "forget", "memory_bytes", "fault_counts", "nodes", "close")
"""Methods of the plug-in interface that have the same name in `Drafter`."""


class PlugIn(Drafter):
    """Adapts an object that implements `propose` and possibly other methods of the interface."""

    def __init__(self, plug_in: Any) -> None:  # noqa: ANN401 - an object of another package
        needs = getattr(plug_in, "needs", NO_NEEDS)
        self._plug_in = plug_in
        self.choices = getattr(plug_in, "choices", {})
        self.traits = Traits(
            DraftSource.HEAD if needs.taps else DraftSource.LOOKUP,
            needs,
            starts_early=bool(getattr(plug_in, "anticipates", False)),
            stops_itself=bool(getattr(plug_in, "stops", False)),
            expects_requests=bool(getattr(plug_in, "expects", False)),
            may_be_absent=bool(getattr(plug_in, "may_be_absent", False)),
            acceptance_by_level=getattr(plug_in, "acceptance_by_level", ()),
        )
        plug_in_names = dict(zip(_METHODS, _METHODS, strict=True)) | {"draft_early": "anticipate"}
        for name, plug_in_name in plug_in_names.items():
            if (method := getattr(plug_in, plug_in_name, None)) is not None:
                setattr(self, name, method)

    @property
    def absent(self) -> tuple[str, ...]:
        names: tuple[str, ...] = getattr(self._plug_in, "absent", ())
        return names


def as_drafter(made: Any) -> Drafter:  # noqa: ANN401 - a drafter, or something with its methods
    return made if isinstance(made, Drafter) else PlugIn(made)
