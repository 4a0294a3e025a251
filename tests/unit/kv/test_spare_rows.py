"""Spare KV rows of pages: which head gets which, and what earlier heads leave."""

from dataclasses import replace

from foreword.kv.block_pool import BlockPool
from foreword.kv.prefix_cache import PrefixCache
from foreword.kv.spare_rows import SpareRows
from foreword.kv.spec import RowSpec

SHAPE = RowSpec("a head", 1, 2, 16)
FIRST, SECOND = (replace(SHAPE, name=f"spare {number}") for number in (1, 2))
OWN = replace(SHAPE, name="loaded at the start")


def laid_out() -> tuple[SpareRows, list[str]]:
    spares, forgotten = SpareRows(), list[str]()
    spares.lay_out((OWN, FIRST, SECOND), (FIRST, SECOND), forgotten.append)
    return spares, forgotten


def test_a_head_has_rows_of_its_own_until_the_pages_are_laid_out():
    spares = SpareRows()
    spares.offer([])
    assert spares.place(SHAPE) == (SHAPE, SHAPE.name)
    spares, _ = laid_out()
    spares.offer([])
    assert spares.place(OWN) == (OWN, OWN.name)


def test_a_spare_has_one_head_at_a_time_and_every_head_its_own_record():
    spares, forgotten = laid_out()
    records = []
    for used, expected in (([OWN], FIRST), ([OWN, FIRST], SECOND), ([SECOND], FIRST), ([SECOND], FIRST)):
        spares.offer(used)
        rows, record = spares.place(SHAPE)
        assert rows == expected
        records.append(record)
    assert len(set(records)) == 4
    assert forgotten == [records[0], records[2]]
    spares.offer([FIRST, SECOND])
    assert spares.place(SHAPE) == (SHAPE, SHAPE.name)


def test_two_heads_of_one_drafter_do_not_get_the_same_spare():
    spares, _ = laid_out()
    spares.offer([])
    assert [spares.place(SHAPE).rows for _ in range(3)] == [FIRST, SECOND, SHAPE]


def test_rows_of_another_shape_do_not_fit():
    spares, _ = laid_out()
    spares.offer([])
    for wider in (replace(SHAPE, num_layers=2), replace(SHAPE, num_kv_heads=1), replace(SHAPE, head_dim=8)):
        assert spares.place(wider).rows == wider


def test_states_of_overwritten_rows_leave_the_prefix_cache():
    pool = BlockPool(2)
    cache = PrefixCache(pool, 2)
    node = cache.add("", (1, 2), pool.allocate(1)[0])
    node.states.update({"first": "states", "second": "states"})  # type: ignore[dict-item]
    cache.void_rows.add("first")
    assert cache.match("", [1, 2, 3]) == [node]
    assert list(node.states) == ["second"]
