"""Who is told of a pass, and what: a request's own drafter, the planned one, and those that a policy brings."""

from collections.abc import Sequence

import pytest
import torch

from foreword.backends.batch import ForwardBatch, ForwardOutput, Tap
from foreword.control.fixed import FixedPolicy
from foreword.drafters.combined import RoutedDrafter
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.spec import RowSpec
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Commit, Drafter, DrafterNeeds, DraftRequest, DraftTask, Traits
from foreword.speculation.measured.situation import Situation
from foreword.speculation.requests import DraftPlan, PassEntry
from foreword.speculation.step import Stepper
from helpers.clocks import ScriptedClock
from helpers.history_target import HistoryTarget
from helpers.pretend_store import PretendStore
from helpers.requests import lone_request

VOCAB = 11
PROMPT = [1, 2, 3, 4, 5, 6, 7]
ROWS = RowSpec("head", 1, 1, 8)


class Target(HistoryTarget):
    """Its hidden state at a row is (tap's layer, position)."""

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        output, rows = super().forward(batch, store), batch.hidden_rows.long()
        hidden = {
            tap: torch.stack([torch.full((len(rows),), tap.layer), batch.positions[rows]], dim=1)
            for tap in batch.taps
        }
        return ForwardOutput(output.logits, hidden)


class Listener(Drafter):
    """Guesses wrong trees, and writes down what it is told and given."""

    def __init__(self, *taps: int, rows: tuple[RowSpec, ...] = (), scratch: int = 0) -> None:
        self.traits = Traits(needs=DrafterNeeds(tuple(map(Tap, taps)), rows, scratch=scratch))
        self.told: list[Commit] = []
        self.asked: list[tuple[int, int]] = []  # (computed rows, reserved rows) when it was asked
        self.forgotten: list[int] = []

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        for ask in asks:
            if ask.pages is not None:
                kv = ask.pages.kv
                self.asked.append((kv.computed, kv.reserved))
        return [Draft((10, 9), (-1, -1), len(ask.request.tokens), ask.request.epoch) for ask in asks]

    def observe(self, commits: Sequence[Commit]) -> None:
        self.told += commits

    def forget(self, request: DraftRequest) -> None:
        self.forgotten.append(request.request_id)


class Turns(FixedPolicy):
    """The brought one and the request's own take turns."""

    def __init__(self, brought: Drafter) -> None:
        super().__init__()
        self._brought, self.turn = brought, 0

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        self.turn += 1
        mine = DraftPlan("brought", self._brought, 2, 1)
        return [mine if self.turn % 2 == 0 else entry.request.speculation for entry in entries]

    def drafters(self) -> list[Drafter]:
        return [self._brought]


def test_all_who_may_draft_for_a_request_are_told_with_the_states_that_each_needs():
    own, brought = Listener(2), Listener(5, 3)
    cache = PagedCache(8)
    stepper = Stepper(Target(), cache, Turns(brought))
    request = lone_request(PROMPT, vocab_size=VOCAB)
    request.kv = cache.open()
    request.speculation = DraftPlan("own", own, 2, 1)
    for _ in range(5):
        stepper.step([PassEntry.of(request, min(request.uncomputed, 4))])
    assert len(own.told) == len(brought.told) == 5
    for drafter in (own, brought):
        position = 0
        for commit in drafter.told:
            assert commit.first == position
            for tap in drafter.traits.needs.taps:
                states = commit.hidden[tap]
                places = range(position, position + commit.rows)
                assert states.tolist() == [[tap.layer, place] for place in places]
            position += commit.rows
    assert [commit.is_on for commit in own.told] == [True, False, True, False, True]
    assert [commit.is_on for commit in brought.told] == [False, True, False, True, False]
    assert set(request.drafter_view.notified.values()) == {own, brought}, "both hear of the end"


class Slow(Listener):
    """Takes seven seconds to observe a pass, and one to draft."""

    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__(1)
        self._clock = clock

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        self._clock.pass_by(1.0)
        return super().propose(asks)

    def observe(self, commits: Sequence[Commit]) -> None:
        self._clock.pass_by(7.0)


def test_the_time_in_which_drafters_observe_a_pass_is_reported_apart():
    clock, cache = ScriptedClock(), PagedCache(8)
    stepper = Stepper(Target(), cache, FixedPolicy(), clock=clock)
    request = lone_request(PROMPT, vocab_size=VOCAB)
    request.kv = cache.open()
    request.speculation = DraftPlan("own", Slow(clock), 2, 1)
    for _ in range(4):
        seconds = stepper.step([PassEntry.of(request, request.uncomputed)]).seconds
        assert seconds.observe == seconds.accept == 7.0
        assert seconds.total == seconds.draft + seconds.observe
    assert [call.is_observing for call in stepper.step([PassEntry.of(request, 1)]).calls] == [True]
    assert stepper.situation.costs.draft_seconds("own", 1) == pytest.approx(8.0, rel=0.01)
    request.speculation = None
    assert stepper.step([PassEntry.of(request, 1)]).seconds.observe == 0.0


class Chooses(FixedPolicy):
    """The head and the other one take turns."""

    def __init__(self, *parts: Drafter) -> None:
        super().__init__()
        self._parts, self.turn = parts, 0

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        self.turn += 1
        return [DraftPlan("chosen", self._parts[self.turn % 2], 2, 1) for _ in entries]


def test_one_that_is_chosen_of_several_is_told_once():
    """As what it is: not once more as a part of all that there are."""
    head, lookup = Listener(2), Listener()
    cache = PagedCache(8)
    stepper = Stepper(Target(), cache, Chooses(head, lookup))
    request = lone_request(PROMPT, vocab_size=VOCAB)
    request.kv = cache.open()
    request.speculation = DraftPlan("route", RoutedDrafter({"head": head, "lookup": lookup}), 2, 1)
    for _ in range(4):
        stepper.step([PassEntry.of(request, min(request.uncomputed, 4))])
    assert [commit.is_on for commit in head.told] == [False, True, False, True]
    assert not lookup.told
    stepper.policy = FixedPolicy()
    stepper.step([PassEntry.of(request, 1)])
    assert len(head.told) == 5
    assert head.told[-1].is_on  # it is a part of what is asked


class TellsNobody(Chooses):
    """Leaves the head out but where it is the head's turn."""

    def notifies(self, request: object) -> bool:
        return False


def test_a_head_that_a_policy_has_left_out_is_not_told_while_another_guesses():
    """States that nobody reads would be copied at every step."""
    head, lookup = Listener(2), Listener()
    cache = PagedCache(8)
    stepper = Stepper(Target(), cache, TellsNobody(head, lookup))
    request = lone_request(PROMPT, vocab_size=VOCAB)
    request.kv = cache.open()
    request.speculation = DraftPlan("route", RoutedDrafter({"head": head, "lookup": lookup}), 2, 1)
    for _ in range(4):
        stepper.step([PassEntry.of(request, min(request.uncomputed, 4))])
    assert [commit.is_on for commit in head.told] == [True, True]


def test_a_commit_says_which_rows_stay_where_they_are():
    """Those of the run; an accepted path may still have to be moved."""
    drafter = Listener(2)
    cache = PagedCache(8)
    stepper = Stepper(Target(), cache, FixedPolicy())
    request = lone_request(PROMPT, vocab_size=VOCAB)
    request.kv = cache.open()
    request.speculation = DraftPlan("own", drafter, 2, 1)
    for _ in range(4):
        stepper.step([PassEntry.of(request, min(request.uncomputed, 4))])
    assert [commit.settled for commit in drafter.told[:2]] == [4, 7]
    for commit in drafter.told[2:]:
        assert commit.settled == commit.first + 1


@pytest.mark.parametrize(("scratch", "expected"), [(0, 3), (20, 21)])
def test_a_drafter_with_rows_in_the_pages_finds_room_behind_the_text(scratch: int, expected: int):
    drafter = Listener(2, rows=(ROWS,), scratch=scratch)
    cache = PagedCache(8)
    stepper = Stepper(Target(), cache, FixedPolicy(), store=PretendStore(8, PAGE_SIZE))
    request = lone_request(PROMPT, vocab_size=VOCAB)
    request.kv = cache.open()
    request.speculation = DraftPlan("own", drafter, 2, 1)
    stepper.step([PassEntry.of(request, 7)])
    stepper.step([PassEntry.of(request, 1)])
    first, end = drafter.asked[-1]
    assert end - first == expected
    cache.check_integrity()


def test_scratch_rows_take_no_page_that_anybody_needs():
    drafter = Listener(2, rows=(ROWS,), scratch=64)
    cache = PagedCache(2)
    stepper = Stepper(Target(), cache, FixedPolicy(), store=PretendStore(2, PAGE_SIZE))
    request = lone_request(PROMPT, vocab_size=VOCAB)
    request.kv = cache.open()
    request.speculation = DraftPlan("own", drafter, 2, 1)
    stepper.step([PassEntry.of(request, 7)])
    stepper.step([PassEntry.of(request, 1)])
    assert drafter.asked[-1][1] == 2 * PAGE_SIZE
    cache.check_integrity()
