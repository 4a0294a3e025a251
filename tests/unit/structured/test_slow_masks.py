"""Masks that are slow are computed between passes, and are the same ones."""

from threading import Event

import pytest

from foreword.structured.limits import MaskLimits
from foreword.structured.masks import MaskBudget, MaskWorker, TenantBudgets
from foreword.structured.params import StructuredOutputs
from foreword.structured.state import GrammarError, GrammarState
from helpers.clocks import ScriptedClock
from helpers.tiny_grammars import END, allowed, encode, grammars
from helpers.waiting import wait_until

AMBIGUOUS = StructuredOutputs(grammar='root ::= s\ns ::= s s s | s s | "a" | "b" | ""')
KEPT = grammars()
SLOW, FAST = 0.02, 0.0
LIMITS = MaskLimits(slow_mask=0.01, calm_masks=2, request_excess=1.0)


class Queue(MaskWorker):
    """Masks that wait until the test has them computed."""

    def put(self, answer) -> None:
        self._waiting.append(answer)

    def compute(self) -> None:
        while self._waiting:
            self._waiting.pop().prepare()


def begin(clock: ScriptedClock, form: StructuredOutputs = AMBIGUOUS, limits: MaskLimits = LIMITS):
    queue = Queue()
    grammar = KEPT.begin(form)._grammar
    grammar.is_slow = False
    return GrammarState(grammar, MaskBudget(TenantBudgets(limits), clock=clock), queue), queue


def test_after_a_slow_mask_the_next_one_is_computed_between_passes():
    clock = ScriptedClock(tick=FAST)
    state, queue = begin(clock)
    allowed(state)
    state.commit(encode("a"))
    assert state.is_ready
    assert state.can_draft
    clock.tick = SLOW
    allowed(state)
    assert not state.can_draft
    assert state.is_ready  # its mask is there
    state.commit(encode("b"))
    assert not state.is_ready
    queue.compute()
    assert state.is_ready
    expected = KEPT.begin(AMBIGUOUS)
    expected.commit(encode("ab"))
    assert allowed(state) == allowed(expected)


def test_a_pass_needs_no_parser_once_masks_are_slow():
    clock = ScriptedClock(tick=SLOW)
    state, queue = begin(clock)
    allowed(state, encode("a"))
    assert not state.can_draft
    began = clock.now
    for _ in range(3):
        mask = state.masks((), ())
        state.commit(encode("b"))
        assert clock.now == began  # neither of them has used the parser
        assert mask.any()
        queue.compute()
        assert clock.now > began
        began = clock.now


def test_masks_that_are_fast_again_are_computed_in_the_pass_again_and_a_relapse_takes_twice_as_long():
    clock = ScriptedClock(tick=FAST)
    state, queue = begin(clock)

    def tokens_until_fast() -> int:
        clock.tick = SLOW
        allowed(state, encode("a"))
        assert not state.can_draft
        clock.tick, count = FAST, 0
        while not state.can_draft:
            state.commit(encode("a"))
            queue.compute()
            count += 1
        return count

    allowed(state)
    first, second = tokens_until_fast(), tokens_until_fast()
    assert first < second


def test_a_new_answer_to_a_slow_grammar_begins_slow_with_its_first_mask():
    clock = ScriptedClock(tick=SLOW)
    state, _ = begin(clock)
    allowed(state, encode("a"))
    later = GrammarState(state._grammar, MaskBudget(TenantBudgets(LIMITS), clock=clock), Queue())
    assert later.is_ready
    assert not later.can_draft
    assert allowed(later) == allowed(KEPT.begin(AMBIGUOUS))


def test_drafts_are_cut_where_masks_are_not_known_once_they_are_slow():
    clock = ScriptedClock(tick=SLOW)
    state, _ = begin(clock)
    chain = encode("a") * 5
    assert state.follows(chain, range(-1, 4)) == [True, True, False, False, False]


def test_what_a_slow_state_is_given_is_still_checked():
    clock = ScriptedClock(tick=SLOW)
    state, queue = begin(clock, StructuredOutputs(grammar='root ::= "a" root "b" | "c"'))
    allowed(state, encode("a"))
    with pytest.raises(GrammarError):
        state.commit(encode("b"))
    state.commit(encode("a"))
    queue.compute()
    with pytest.raises(GrammarError):
        state.commit(encode("x"))
    state.commit(encode("c"))
    queue.compute()
    assert allowed(state) == [b"b"]
    state.commit([*encode("b"), END])
    assert state.is_ready or queue._waiting


def test_an_answer_over_its_budget_is_allowed_nothing_and_says_why():
    clock = ScriptedClock(tick=SLOW)
    state, queue = begin(clock, limits=MaskLimits(slow_mask=0.01, free_per_token=0.0, request_excess=0.1))
    for _ in range(20):
        if not allowed(state):
            break
        state.commit(encode("a"))
        queue.compute()
    assert "its masks took over 0.1 s more" in str(state.error)
    assert clock.now < 20 * SLOW * 3


def test_nothing_is_committed_after_an_end():
    for tick in (FAST, SLOW):
        state, queue = begin(ScriptedClock(tick=tick))
        allowed(state)
        state.commit([END])
        queue.compute()
        with pytest.raises(GrammarError):
            state.commit(encode("a"))


def test_an_answer_is_ready_whatever_its_mask_has_raised(monkeypatch: pytest.MonkeyPatch):
    state, _ = begin(ScriptedClock(tick=SLOW))
    allowed(state, encode("a"))
    state.commit(encode("b"))
    assert not state.is_ready
    monkeypatch.setattr(state, "_take_back", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        state.prepare()
    assert state.is_ready


def test_draft_tokens_that_are_rejected_do_not_use_up_what_an_answer_may_cost():
    """Masks of 4 ms are fast and free for a token each; those of five draft tokens are not."""
    clock = ScriptedClock(tick=0.004)
    state, _ = begin(clock, limits=MaskLimits(request_excess=0.1))
    draft, drafted = encode("bbbbb"), 0
    for _ in range(100):
        if state.can_draft:
            drafted += 1
            state.masks(draft, range(-1, len(draft) - 1))
        assert allowed(state), state.error
        state.commit(encode("a"))
    assert 10 < drafted < 100
    assert state.error is None


def test_the_worker_goes_on_after_a_mask_that_raised(caplog: pytest.LogCaptureFixture):
    prepared = Event()

    class Broken:
        used = 0.0

        def prepare(self) -> None:
            raise BaseException("the parser panicked")

    class Other:
        used = 1.0

        def prepare(self) -> None:
            prepared.set()

    worker = MaskWorker()
    worker.put(Broken())
    worker.wait(60)
    worker.put(Other())
    assert prepared.wait(60)
    worker.close()
    assert "a mask could not be computed" in caplog.text


def test_the_worker_takes_who_has_used_least_first_and_wakes_who_waits():
    going_on, order = Event(), []

    class Answer:
        def __init__(self, used: float) -> None:
            self.used = used

        def prepare(self) -> None:
            going_on.wait()
            order.append(self.used)

    worker = MaskWorker()
    worker.put(Answer(9.0))
    wait_until(lambda: not worker._waiting)  # it is being computed
    for used in (5.0, 1.0, 3.0):
        worker.put(Answer(used))
    going_on.set()
    worker.wait(60)
    wait_until(lambda: len(order) == 4)
    assert order == [9.0, 1.0, 3.0, 5.0]
    worker.close()
