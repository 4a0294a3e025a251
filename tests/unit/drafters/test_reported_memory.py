"""Drafters may say what memory they add; whoever wraps them passes it on."""

import pytest

from foreword.drafters.combined import FallbackDrafter, MergedDrafter
from foreword.drafters.guard import GuardedDrafter
from foreword.speculation.drafting import Drafter, added_memory


class Silent(Drafter):
    def propose(self, asks):
        return []

    def forget(self, request):
        pass


class Heavy(Silent):
    def memory_bytes(self) -> int:
        return 1000


def guarded(drafter) -> GuardedDrafter:
    return GuardedDrafter(drafter, "test")


def test_only_those_that_can_say_count():
    assert guarded(Heavy()).memory_bytes() == 1000
    assert guarded(Silent()).memory_bytes() is None
    assert added_memory([]) is None


@pytest.mark.parametrize("combined", [FallbackDrafter, MergedDrafter])
def test_combined_drafters_add_up(combined):
    assert combined([guarded(Heavy()), guarded(Silent()), Heavy()]).memory_bytes() == 2000
    assert combined([Silent(), guarded(Silent())]).memory_bytes() is None
