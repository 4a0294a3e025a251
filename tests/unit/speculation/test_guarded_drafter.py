"""Whatever a drafter does, the caller gets one usable draft for every ask."""

import logging
import threading

import pytest

from foreword.speculation.draft import Draft
from foreword.speculation.guard import GuardedDrafter
from helpers.asks import TextRequest, ask

GOOD = Draft.chain([1, 2], 1)


class Scripted:
    def __init__(self, answer) -> None:
        self.answer = answer

    def propose(self, asks):
        return self.answer(asks)

    def forget(self, request):
        raise RuntimeError("forgetting fails too")


def guarded(answer, time_limit: float = 5.0) -> GuardedDrafter:
    return GuardedDrafter(Scripted(answer), "scripted", vocab_size=10, time_limit=time_limit)


def explode(_asks):
    raise RuntimeError("boom")


NONSENSE = {
    "raises": explode,
    "returns nothing": lambda asks: None,
    "too few drafts": lambda asks: [],
    "too many drafts": lambda asks: [GOOD] * (len(asks) + 1),
    "not drafts": lambda asks: ["hello"] * len(asks),
    "not a number": lambda asks: [Draft.chain([float("nan")], 1)] * len(asks),
    "not an integer": lambda asks: [Draft.chain([1.5], 1)] * len(asks),
    "id too large": lambda asks: [Draft.chain([10], 1)] * len(asks),
    "id negative": lambda asks: [Draft.chain([-1], 1)] * len(asks),
    "a cycle": lambda asks: [Draft((1, 2), (1, 0), 1)] * len(asks),
    "too many nodes": lambda asks: [Draft.chain([1] * 9, 1)] * len(asks),
    "too deep": lambda asks: [Draft.chain([1] * 5, 1)] * len(asks),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_becomes_an_empty_draft_is_counted_and_logged_once(kind: str, caplog):
    drafter = guarded(NONSENSE[kind])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            drafts = drafter.propose([ask([0], 8, 4), ask([0], 8, 4)])
            assert [len(draft) for draft in drafts] == [0, 0]
    assert sum(drafter.faults.values()) >= 3
    assert len(caplog.records) == 1
    drafter.close()


def test_one_bad_draft_does_not_spoil_the_others():
    drafter = guarded(lambda asks: [GOOD, Draft.chain([99], 1), GOOD])
    assert drafter.propose([ask([0])] * 3) == [GOOD, Draft(), GOOD]
    drafter.close()


def test_a_drafter_that_hangs_is_left_alone_until_it_comes_back():
    release = threading.Event()
    calls = []

    def hang_once(asks):
        calls.append(len(asks))
        if len(calls) == 1:
            release.wait(30)
        return [GOOD] * len(asks)

    drafter = guarded(hang_once, time_limit=0.05)
    assert drafter.propose([ask([0])]) == [Draft()]
    assert drafter.propose([ask([0])]) == [Draft()]  # not even asked
    assert len(calls) == 1
    release.set()
    drafter._hanging.result(30)
    assert drafter.propose([ask([0])]) == [GOOD]
    assert drafter.faults == {"timeout": 1}
    drafter.close()


def test_a_failure_to_forget_is_a_fault_too():
    drafter = guarded(lambda asks: [GOOD])
    drafter.forget(TextRequest([1]))
    assert drafter.faults == {"exception": 1}
    drafter.close()


def test_a_drafter_that_hangs_forgets_when_it_comes_back():
    """A request that ends meanwhile must not stay with the drafter for ever."""
    release, forgotten = threading.Event(), []

    class Slow:
        def propose(self, asks):
            release.wait(30)
            return [GOOD] * len(asks)

        def forget(self, request):
            forgotten.append(request)

    drafter = GuardedDrafter(Slow(), "slow", vocab_size=10, time_limit=0.05)
    request = TextRequest([1])
    assert drafter.propose([ask([0])]) == [Draft()]
    drafter.forget(request)
    assert forgotten == []
    release.set()
    drafter._hanging.result(30)
    assert drafter.propose([ask([0])]) == [GOOD]  # what was put off is done before anything else
    assert forgotten == [request]
    drafter.close()
