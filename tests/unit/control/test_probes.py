"""Drafts that are only compared with the text: when they are asked for, and what they may cost."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from foreword.control.learning.exploring import Explorer
from foreword.control.learning.probes import MOST_SAVED, Account, TimeBank
from foreword.control.measured import MeasuredPolicy
from helpers.traffic import CPU, Kind, Traffic, lookup


def test_a_drafter_is_not_tried_again_before_the_text_of_its_last_draft_has_come():
    """Asked more often where it is right, it would look as if it had something to say more often."""
    traffic = Traffic(lambda rows: 0.01 * rows, [lookup(code=Kind(0.9, 0.95))], 1, ("code",))
    policy = MeasuredPolicy()
    tried = 0
    for _ in range(200):
        traffic.run(policy, 1)
        assert not any(control.is_on for control in policy.controls.values())
        for record in policy._records.values():
            found = Counter(id(waiting.fit) for waiting in record.waiting)
            tried += len(found)
            assert max(found.values(), default=0) <= 1
    assert tried


@pytest.mark.parametrize("batch", [8, 32])
def test_a_drafter_whose_cost_nobody_knows_is_tried_where_passes_are_long(batch: int):
    """It is taken to be as dear as a pass, which is more than is saved for others."""
    traffic = Traffic(CPU, [lookup(code=Kind(0.7, 0.9))], batch, ("code",))
    policy = MeasuredPolicy()
    traffic.run(policy, 400 * batch)
    assert sum(control.estimate.asks for control in policy.controls.values()) >= 3


@pytest.mark.parametrize(("behind", "price"), [(0, 0.1), (50, 0.6), (200, None)])
def test_what_a_drafter_has_to_catch_up_with_is_part_of_the_price(behind: int, price: float | None):
    bank = TimeBank(accounts={"head": Account(1.0)})
    control = SimpleNamespace(probe_seconds=0.1, probe_more=0.1, probe_behind=0.01)
    arm: Any = SimpleNamespace(plan=SimpleNamespace(method="head"), control=control, heard=20)
    record: Any = SimpleNamespace(length=20 + behind)
    found = Explorer(bank, 0, 0.0)._price(record, arm, 0.0)
    assert found == (None if price is None else pytest.approx(price))


def test_a_long_quiet_time_saves_no_more_than_a_little():
    """Or all of it would be spent at once when others come."""
    bank = TimeBank()
    bank.earn(1e6, 0.01, ["lookup"])
    assert bank.accounts["lookup"].balance == MOST_SAVED <= 0.01
    assert not bank.affords("lookup", 0.05)
    bank.earn(1e6, 0.01, ["lookup"])
    assert bank.affords("lookup", 0.05), "one that is dearer is saved for"
