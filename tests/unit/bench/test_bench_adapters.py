"""Which ways are compared, on a tiny model; how long they take is nobody's business here."""

import pytest

from foreword.bench.pass_costs import measure_adapters
from foreword.errors import RequestError
from helpers.adapters import decoder_of


def test_every_way_is_timed_in_every_round():
    told: list[tuple[int, int]] = []
    costs = measure_adapters(decoder_of("torch"), 2, 4, 2, lambda *now: told.append(now))
    assert [(cost.adapters, cost.modules) for cost in costs] == [
        (0, ""),
        (2, "q, v"),
        (2, "q, k, v, o"),
        (2, "all seven"),
        (1, "all seven"),
    ]
    assert costs[0].ratio == 1
    assert all(cost.ms > 0 for cost in costs)
    assert told == [(turn, 15) for turn in range(1, 16)]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"rank": 129}, {"repeats": 0}])
def test_what_cannot_be_measured_is_refused(wrong: dict[str, int]):
    sizes = {"batch": 2, "rank": 4, "repeats": 1} | wrong
    with pytest.raises(RequestError, match="must be at least 1"):
        measure_adapters(decoder_of("torch"), progress=lambda *_: None, **sizes)
