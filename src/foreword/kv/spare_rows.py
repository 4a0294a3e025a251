"""KV rows of pages for draft heads that are loaded after the pages were laid out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from foreword.kv.spec import RowSpec


class RowsPlace(NamedTuple):
    """The KV rows of a loaded head."""

    rows: RowSpec  # as the pages have them
    # Name under which sequences and the prefix cache record which of them are filled. It differs from the name of the
    # rows if other heads may use the same rows earlier or later.
    record: str


class SpareRows:
    """The spare KV rows of an engine's pages, each for one head at a time.

    One thread at a time may call `offer` and `place`: the drafter pool creates one drafter at a time.
    """

    def __init__(self) -> None:
        self._laid_out: Sequence[RowSpec] | None = None  # all rows of drafters; None: not known yet
        self._spare: Sequence[RowSpec] = ()
        self._free: list[RowSpec] = []
        self._records: dict[str, str] = {}  # newest record of every spare, by the spare's name
        self._forget: Callable[[str], None] = lambda record: None
        self._placed = 0

    def lay_out(
        self, rows: Sequence[RowSpec], spare: Sequence[RowSpec], forget: Callable[[str], None]
    ) -> None:
        """Set the rows that the pages have for drafters, the spare ones included.

        `forget` is called with a record whose rows another head will overwrite.
        """
        self._laid_out, self._spare, self._forget = rows, spare, forget

    def offer(self, used: Iterable[RowSpec]) -> bool:
        """Let the next drafter use the spare rows that are not among `used`, the rows of all open drafters.

        Return False if all spare rows are used.
        """
        taken = set(used)
        self._free = [row for row in self._spare if row not in taken]
        return bool(self._free) or not self._spare

    def has(self, rows: Iterable[RowSpec]) -> bool:
        """Return whether any of these rows is a spare one."""
        return not set(self._spare).isdisjoint(rows)

    def place(self, rows: RowSpec) -> RowsPlace:
        """Return where a head keeps its rows: spare ones of the same shape if the pages were laid out without `rows`.

        Without free spare rows of that shape, `rows` is returned, and the caller finds that the pages lack it.
        """
        if self._laid_out is None or rows in self._laid_out:
            return RowsPlace(rows, rows.name)
        for spare in self._free:
            if replace(rows, name=spare.name) == spare:
                self._free.remove(spare)
                return RowsPlace(spare, self._new_record(spare, rows))
        return RowsPlace(rows, rows.name)

    def _new_record(self, spare: RowSpec, rows: RowSpec) -> str:
        """Return a record for the head with these rows; forget the record of the spare's earlier head."""
        if (earlier := self._records.get(spare.name)) is not None:
            self._forget(earlier)
        self._placed += 1
        record = self._records[spare.name] = f"{rows.name} ({spare.name}, {self._placed})"
        return record
