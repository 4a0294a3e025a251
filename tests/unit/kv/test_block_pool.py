import pytest

from foreword.kv.block_pool import BlockPool, OutOfPages


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(OutOfPages):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity([held])


def test_a_shared_page_is_free_only_after_its_last_holder():
    pool = BlockPool(2)
    (page,) = pool.allocate(1)
    pool.share([page])
    assert pool.is_shared(page)
    pool.release([page])
    assert not pool.is_shared(page)
    assert pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2


def test_a_free_page_can_be_neither_shared_nor_released():
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="free"):
        pool.share([0])
    with pytest.raises(ValueError, match="more often"):
        pool.release([0])


def test_integrity_check_sees_a_leak_and_a_double_hold():
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check_integrity([held[:1]])
    with pytest.raises(AssertionError):
        pool.check_integrity([held, held[:1]])
