"""Whatever a drafter does, the caller gets one usable draft for every ask."""

import asyncio
import gc
import logging
import sys
import threading
import weakref

import numpy as np
import pytest

from foreword.acceptance.rules.trees import Drawn
from foreword.drafters.guard import MAX_PAUSE, PAUSE_FACTOR, CallerThread, GuardedDrafter
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter
from helpers.asks import ask, text_request
from helpers.warm_process import warm

GOOD = Draft.chain([1, 2], 1)
VOCAB = 10


class Scripted(Drafter):
    def __init__(self, answer) -> None:
        self.answer = answer

    def propose(self, asks):
        return self.answer(asks)

    def forget(self, request):
        raise RuntimeError("forgetting fails too")


def asks(count: int = 1):
    return [ask(text_request([0], vocab_size=VOCAB), 8, 4) for _ in range(count)]


def explode(_asks):
    raise RuntimeError("boom")


def cancel(_asks):
    raise asyncio.CancelledError


def leave(_asks):
    sys.exit(3)


NONSENSE = {
    "raises": explode,
    "is cancelled": cancel,
    "exits": leave,
    "returns nothing": lambda asks: None,
    "too few drafts": lambda asks: [],
    "too many drafts": lambda asks: [GOOD] * (len(asks) + 1),
    "not drafts": lambda asks: ["hello"] * len(asks),
    "not a number": lambda asks: [Draft.chain([float("nan")], 1)] * len(asks),
    "not an integer": lambda asks: [Draft.chain([1.5], 1)] * len(asks),
    "id too large": lambda asks: [Draft.chain([10], 1)] * len(asks),
    "id negative": lambda asks: [Draft.chain([-1], 1)] * len(asks),
    "a cycle": lambda asks: [Draft((1, 2), (1, 0), 1)] * len(asks),
}


@pytest.fixture(params=["in place", "in a thread"])
def guarded(request):
    """A drafter with this answer, called in both ways."""
    guards = []

    def make(answer) -> GuardedDrafter:
        caller = CallerThread("scripted", 60.0) if request.param == "in a thread" else None
        guards.append(GuardedDrafter(Scripted(answer), "scripted", caller))
        return guards[-1]

    yield make
    for guard in guards:
        guard.close()


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_becomes_an_empty_draft_is_counted_and_logged_once(guarded, kind: str, caplog):
    drafter = guarded(NONSENSE[kind])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [len(draft) for draft in drafter.propose(asks(2))] == [0, 0]
    assert sum(drafter.faults.values()) >= 3
    assert len(caplog.records) == 1


def interrupt(_asks):
    raise KeyboardInterrupt


def test_ctrl_c_is_the_users_and_not_the_drafters():
    with pytest.raises(KeyboardInterrupt):
        GuardedDrafter(Scripted(interrupt), "scripted").propose(asks())


def test_an_interrupt_that_no_key_has_made_is_the_drafters():
    """A signal comes to the main thread alone; in any other it would end the engine with everyone's requests."""
    threaded = GuardedDrafter(Scripted(interrupt), "scripted", CallerThread("scripted", 60))
    assert threaded.propose(asks()) == [Draft()]
    assert threaded.faults == {"exception": 1}
    inline, answers = GuardedDrafter(Scripted(interrupt), "scripted"), []
    engine = threading.Thread(target=lambda: answers.append(inline.propose(asks())))
    engine.start()
    engine.join()
    assert (answers, inline.faults) == ([[Draft()]], {"exception": 1})


def test_what_is_too_much_is_cut_and_the_rest_is_used(guarded):
    too_many = guarded(lambda asks: [Draft((1,) * 9, (-1,) * 9, 1)])
    assert too_many.propose(asks()) == [Draft((1,) * 8, (-1,) * 8, 1)]
    too_deep = guarded(lambda asks: [Draft.chain([1] * 5, 1)])
    assert too_deep.propose(asks()) == [Draft.chain([1] * 4, 1)]
    assert (too_many.faults, too_deep.faults) == ({"draft": 1}, {"draft": 1})


def test_a_chain_is_cut_where_a_token_does_not_exist(guarded):
    drafter = guarded(lambda asks: [Draft.chain([1, 2, VOCAB, 3], 1)])
    assert drafter.propose(asks()) == [Draft.chain([1, 2], 1)]
    assert drafter.faults == {"draft": 1}


def test_a_drawn_node_is_cut_for_its_q_and_never_for_its_token(guarded):
    """Two draws of one q, which reaches beyond the vocabulary: both go, whatever came out."""
    q = Drawn(np.array([3, VOCAB]), np.array([0.5, 0.5]))
    inside = Drawn(np.array([1, 2]), np.array([0.5, 0.5]))
    kept = Draft.chain([1], 1, drawn=[inside])
    for came_out in (3, VOCAB):
        drafter = guarded(
            lambda asks, token=came_out: [Draft.chain([1, token, 1], 1, 0, [inside, q, inside])]
        )
        assert drafter.propose(asks()) == [kept]


def test_one_bad_draft_does_not_spoil_the_others(guarded):
    drafter = guarded(lambda asks: [GOOD, Draft.chain([99], 1), GOOD])
    assert drafter.propose(asks(3)) == [GOOD, Draft(committed_len=1), GOOD]


def test_a_late_draft_is_cut_after_what_the_text_has_passed_is_gone(guarded):
    drafter = guarded(lambda asks: [Draft.chain([7, 8, 9, 5], 1)])
    (found,) = drafter.propose([ask(text_request([0, 7, 8], vocab_size=VOCAB), 2, 2)])
    assert found == Draft.chain([9, 5], 3)
    assert not drafter.faults


@pytest.mark.parametrize("length", [-100, 3.0, None])
def test_a_draft_for_no_text_at_all_costs_its_guesses_alone(guarded, length):
    drafter = guarded(lambda asks: [Draft((1,), (-1,), length)])
    assert [len(draft) for draft in drafter.propose(asks())] == [0]
    assert drafter.faults == {"exception": 1}


def test_lists_and_numpy_numbers_are_made_plain(guarded):
    """They would reach outputs, where json refuses them."""
    draft = Draft(np.array([1, 2]), [-1, 0], np.int64(1))  # type: ignore[arg-type]
    (found,) = guarded(lambda asks: [draft]).propose(asks())
    assert found == GOOD
    assert all(type(token) is int for token in found.tokens)


def test_a_failure_to_forget_is_a_fault_too(guarded):
    drafter = guarded(lambda asks: [GOOD])
    drafter.forget(text_request([1]))
    assert drafter.faults == {"exception": 1}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Hanging(Drafter):
    """Hangs in its first call until it is released."""

    def __init__(self) -> None:
        self.release, self.calls, self.forgotten = threading.Event(), 0, []

    def propose(self, asks):
        self.calls += 1
        if self.calls == 1:
            self.release.wait(30)
        return [GOOD] * len(asks)

    def forget(self, request):
        self.forgotten.append(request)


def hanging(clock: Clock) -> tuple[Hanging, GuardedDrafter, CallerThread]:
    drafter, limit = Hanging(), 0.01
    caller = CallerThread("hanging", limit, clock)
    guard = GuardedDrafter(drafter, "hanging", caller)
    assert guard.propose(asks()) == [Draft()]
    caller._time_limit = 30.0  # from here on a busy machine is not a late drafter
    return drafter, guard, caller


def test_a_drafter_that_hangs_is_left_alone_until_it_comes_back_and_has_rested():
    clock = Clock()
    drafter, guard, caller = hanging(clock)
    clock.now = MAX_PAUSE
    assert guard.propose(asks()) == [Draft()]  # not even asked
    assert drafter.calls == 1
    drafter.release.set()
    assert caller._hanging.result(30) == [GOOD]
    assert guard.propose(asks()) == [GOOD]
    assert guard.faults == {"timeout": 1}
    guard.close()


def test_a_drafter_that_is_late_again_and_again_is_asked_ever_less_often():
    clock = Clock()
    caller = CallerThread("late", 1.0, clock)
    rests = []
    for _ in range(12):
        begun = clock.now
        caller._pause()
        while not caller.is_available:
            clock.now += 1.0
        rests.append(clock.now - begun)
    assert rests[:3] == [PAUSE_FACTOR, 2 * PAUSE_FACTOR, 4 * PAUSE_FACTOR]
    assert max(rests) == MAX_PAUSE
    caller.call(lambda: None)
    begun = clock.now
    caller._pause()
    assert caller._paused_until - begun == MAX_PAUSE  # one answer in time is not enough to be trusted again
    caller.close()


def test_ended_requests_do_not_live_on_in_a_drafter_that_hangs():
    """Only their numbers wait for it; it forgets them when it comes back."""
    drafter, guard, caller = hanging(Clock())
    texts = [_Tokens([1, 2, 3]) for _ in range(300)]
    alive = [weakref.ref(text) for text in texts]
    requests = [text_request(text) for text in texts]
    numbers = [request.request_id for request in requests]
    for request in requests:
        guard.forget(request)
    del texts, requests, request
    gc.collect()
    assert not any(text() for text in alive)
    drafter.release.set()
    done = threading.Event()
    caller.later(done.set)
    assert done.wait(30)
    assert [request.request_id for request in drafter.forgotten] == numbers
    guard.close()


class _Tokens(list):
    """A list that can be watched."""


def test_a_drafter_that_hangs_for_ever_keeps_no_process_alive():
    program = (
        "import threading\n"
        "from foreword.drafters.guard import CallerThread\n"
        "from foreword.drafters.guard import NoAnswer\n"
        "caller = CallerThread('stuck', 0.01)\n"
        "try:\n"
        "    caller.call(threading.Event().wait)\n"
        "except NoAnswer:\n"
        "    print('left')\n"
    )
    ended = warm.run([], None, 120, program=program)
    assert (ended.returncode, ended.stdout) == (0, "left\n")
