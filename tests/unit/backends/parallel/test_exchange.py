"""What ranks say to each other: everyone gets the same bits, and who has failed leaves nobody waiting."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword.backends.parallel.exchange import PlannedExchange, RankExchange
from foreword.errors import EngineStopped

SIZE = 3


class Done:
    def wait(self) -> None:
        pass


class Table:
    """A group whose ranks are threads: each lays down what it has, and takes what all have."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(SIZE, timeout=10)
        self.laid: dict[int, Tensor] = {}

    def meet(self, rank: int, part: Tensor, taken: Sequence[Tensor]) -> Done:
        self.laid[rank] = part
        self._barrier.wait()
        for place, room in enumerate(taken):
            room.copy_(self.laid[place])
        self._barrier.wait()
        return Done()


class Seat:
    """One rank's place at the table, with the calls of torch's groups."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def allgather(self, taken: list[list[Tensor]], parts: list[Tensor]) -> Done:
        return self._table.meet(self._rank, parts[0], taken[0])

    def gather(self, taken: list[list[Tensor]], parts: list[Tensor], _: object) -> Done:
        return self._table.meet(self._rank, parts[0], taken[0] if taken else [])

    def broadcast(self, parts: list[Tensor], _: object) -> Done:
        return self._table.meet(self._rank, parts[0].clone(), parts if self._rank else [])


def at_all_ranks(act: Callable[[RankExchange], Any]) -> list[Any]:
    table, found = Table(), [None] * SIZE

    def run(rank: int) -> None:
        found[rank] = act(RankExchange(Seat(table, rank), rank, SIZE))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


PARTS = (1.0, 1e8, -1e8)
"""Whose sum is 0 from the first to the last, and 1 in any order that ends with the first."""


def test_sums_are_added_in_the_order_of_the_ranks_at_every_rank():
    sums = at_all_ranks(lambda exchange: exchange.total(torch.full((2, 3), PARTS[exchange.rank])))
    assert all(torch.equal(one, torch.zeros(2, 3)) for one in sums)


def test_halves_are_added_in_float32():
    halves = (1.0, 2**-8, 2**-8)
    sums = at_all_ranks(
        lambda exchange: exchange.total(torch.full((1, 1), halves[exchange.rank], dtype=torch.bfloat16))
    )
    assert [one.item() for one in sums] == [1 + 2**-7] * SIZE
    assert {one.dtype for one in sums} == {torch.bfloat16}


def test_means_are_over_the_columns_of_all():
    means = at_all_ranks(lambda exchange: exchange.mean(torch.full((2, 4), float(exchange.rank))))
    assert all(torch.equal(one, torch.ones(2, 1)) for one in means)


def test_columns_are_joined_at_the_first_rank():
    joined = at_all_ranks(lambda exchange: exchange.gather_columns(torch.full((1, 2), exchange.rank)))
    assert joined[0].tolist() == [[0, 0, 1, 1, 2, 2]]
    assert at_all_ranks(lambda exchange: exchange.gather_columns(torch.empty(0, 2)).shape)[0] == (0, 6)


def test_what_the_first_rank_has_is_spread():
    def act(exchange: RankExchange) -> list[int]:
        numbers = torch.tensor([5, 6]) if exchange.rank == 0 else torch.zeros(2, dtype=torch.int64)
        exchange.broadcast(numbers)
        return numbers.tolist()

    assert at_all_ranks(act) == [[5, 6]] * SIZE


@pytest.mark.parametrize("at", range(4))
def test_a_rank_that_fails_in_a_pass_takes_part_in_the_rest_of_it(at: int):
    planned = [PlannedExchange((2, 4), torch.float32)] * 3 + [
        PlannedExchange((1, 5), torch.float32, is_gathered_once=True)
    ]

    def act(exchange: RankExchange) -> int:
        exchange.begin()
        for place, one in enumerate(planned):
            if exchange.rank == 1 and place == at:
                exchange.finish(planned, torch.device("cpu"))
                break
            said = exchange.gather_columns if one.is_gathered_once else exchange.total
            got = said(torch.ones(one.shape))
            assert bool(got.isnan().any()) == (
                place >= at and (not one.is_gathered_once or exchange.rank == 0)
            )
        return 1

    assert at_all_ranks(act) == [1] * SIZE


def test_a_group_that_breaks_is_told_in_one_line():
    class Broken:
        def allgather(self, *_: object) -> None:
            raise RuntimeError("Connection closed\nby peer")

    exchange = RankExchange(Broken(), 0, 2)
    with pytest.raises(EngineStopped, match="another rank is gone: Connection closed by peer"):
        exchange.total(torch.ones(1, 1))
    with pytest.raises(EngineStopped, match="are out of step"):
        exchange.finish([PlannedExchange((1, 1), torch.float32)], torch.device("cpu"))
