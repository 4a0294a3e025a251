"""Drafters that say the same of nodes are one connection, as long as one of them is there."""

from collections import Counter
from typing import Any

import pytest

from foreword.cluster.settings import RemoteConfig
from foreword.cluster.shared_nodes import SharedNodes

HERE, THERE = RemoteConfig("127.0.0.1:1"), RemoteConfig("127.0.0.1:2")


class Connected:
    def __init__(self) -> None:
        self.closed = 0

    def nodes(self) -> list[str]:
        return ["node"]

    def fault_counts(self) -> Counter[str]:
        return Counter(late=2)

    def close(self) -> None:
        self.closed += 1


def test_the_connection_is_made_once_and_ends_with_its_last_use():
    shared, made = SharedNodes(), []

    def make() -> Any:
        made.append(Connected())
        return made[-1]

    first, second = shared.use(HERE, make), shared.use(HERE, make)
    other = shared.use(THERE, make)
    assert len(made) == 2
    assert first.drafter is second.drafter is not other.drafter
    assert [use.nodes() for use in (first, second, other)] == [["node"], [], ["node"]]
    assert first.fault_counts() + second.fault_counts() == Counter(late=2)
    first.close()
    first.close()
    assert not made[0].closed
    assert second.nodes() == ["node"]
    second.close()
    assert [one.closed for one in made] == [1, 0]
    assert shared.use(HERE, make).drafter is made[2]  # nobody was connected any more


def test_a_connection_that_cannot_be_made_leaves_nothing_behind():
    shared, good = SharedNodes(), Connected()

    def refused() -> Any:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        shared.use(HERE, refused)
    made: Any = good
    assert shared.use(HERE, lambda: made).drafter is made
