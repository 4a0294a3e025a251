"""Drafters that other packages wrote without the base class, adapted once when they are made."""

from typing import Any

from foreword.speculation.drafting import NO_NEEDS, Drafter, DraftSource, Traits

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
