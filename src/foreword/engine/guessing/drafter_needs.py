"""What drafters have to be given, all together."""

from collections.abc import Sequence
from functools import reduce
from operator import or_

from foreword.speculation.drafting import NO_NEEDS, Drafter, DrafterNeeds, needs_of
from foreword.speculation.requests import DraftPlan


def needs_of_all(default: DraftPlan | None, others: Sequence[Drafter]) -> DrafterNeeds:
    """Of the drafters that are there from the start."""
    known = [*others, *([] if default is None else [default.drafter])]
    return reduce(or_, map(needs_of, known), NO_NEEDS)
