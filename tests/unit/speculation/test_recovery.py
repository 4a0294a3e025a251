"""Steps that fail and are tried again."""

import itertools
import random
from collections import deque
from collections.abc import Sequence

import pytest
import torch

from foreword.acceptance.batch import Verdicts
from foreword.acceptance.judge import Judging
from foreword.acceptance.params import SamplingParams
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.control.fixed import FixedPolicy
from foreword.errors import EngineStopped
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.accept import Acceptance
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from foreword.speculation.recovery import Recovery, StepInFlight
from foreword.speculation.requests import PassEntry, Verdict
from foreword.speculation.step import Stepper
from helpers.checked_target import CheckedTarget
from helpers.clocks import ScriptedClock
from helpers.engines import ask, core_on
from helpers.history_target import HistoryTarget
from helpers.requests import lone_request
from helpers.saboteur import Saboteur


class OneFault(CheckedTarget):
    """One of its passes fails, before it has done anything."""

    def __init__(self, bad_pass: int) -> None:
        super().__init__(Saboteur(random.Random(0), 0.0))
        self._bad_pass = bad_pass
        self._begun = 0

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        self._begun += 1
        if self._begun == self._bad_pass:
            raise RuntimeError("planted")
        return super().forward(batch, store)


@pytest.mark.parametrize("bad_pass", [1, 2, 3])
def test_what_ends_the_engine_is_not_recovered_from(bad_pass: int, monkeypatch: pytest.MonkeyPatch):
    """Neither at the first try nor when a pass that failed is run again, with all requests or one at a time."""

    class Ends(OneFault):
        def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
            try:
                return super().forward(batch, store)
            except RuntimeError:
                raise EngineStopped("gone") from None

    target = Ends(bad_pass)
    if bad_pass > 1:  # the passes before it fail as usual

        def fails(self: CheckedTarget, batch: ForwardBatch, store: object = None) -> ForwardOutput:
            raise ValueError("planted")

        monkeypatch.setattr(CheckedTarget, "forward", fails)
    core = core_on(target)
    request = ask(core, [1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    with pytest.raises(EngineStopped):
        core.step()
    assert request.finish_reason is None


def test_a_launch_that_failed_keeps_its_requests_until_it_is_resolved():
    """Else the next launch takes them up, and the second try fails them for being under way already."""
    assert faults_of(OneFault(bad_pass=1)) == {"step": 1}


def test_a_launch_ahead_that_failed_is_made_again_when_the_step_before_it_has_ended():
    assert faults_of(OneFault(bad_pass=2)) == {"ahead": 1}


def test_after_two_faults_at_once_every_pass_is_counted_again(monkeypatch: pytest.MonkeyPatch):
    """A chunk of a prompt is under way and fails late, and the next could not be launched."""
    core = core_on(OneFault(bad_pass=2), max_num_batched_tokens=8)
    request = ask(core, [1, 2, 3] * 8, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    real, calls = Acceptance.verdicts, itertools.count()

    def fails_once(acceptance: Acceptance) -> list[Verdict]:
        if next(calls) == 0:
            raise RuntimeError("planted")
        return real(acceptance)

    monkeypatch.setattr(Acceptance, "verdicts", fails_once)
    under_way: deque[StepInFlight] = deque()
    while core.has_requests or under_way:
        while len(under_way) < 2 and (launched := core.launch()) is not None:
            under_way.append(launched)
        if request.finish_reason is None:
            assert request.kv.passes == sum(request in [e.request for e in one.entries] for one in under_way)
        core.resolve(under_way.popleft())
        core.check_integrity()
    assert (request.finish_reason, dict(core.faults)) == ("length", {"ahead": 1, "step": 1})


class SecondSibling(Drafter):
    """Guesses two tokens for the same place, the second of which is right: its row has to be moved."""

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        return [self._draft(list(one.request.tokens)) for one in asks]

    def _draft(self, tokens: list[int]) -> Draft:
        right = int(HistoryTarget().logits_after(tokens).argmax())
        return Draft(((right + 1) % 11, right), (ROOT, ROOT), len(tokens))

    def forget(self, request: DraftRequest) -> None:
        """Nothing is kept."""


def test_one_whose_rows_are_moved_by_a_later_pass_is_not_given_up(monkeypatch: pytest.MonkeyPatch):
    """Its own step could not be launched, and the moves that it waits for went with another's."""
    cache = PagedCache(8)
    requests = [lone_request(prompt, vocab_size=11) for prompt in ([1, 2, 3], [4, 5])]
    for request in requests:
        request.kv = cache.open("", request.tokens)
    first, other = requests
    recovery = Recovery(Stepper(HistoryTarget(), cache, FixedPolicy(SecondSibling(), 2)))
    recovery.stepper.step([PassEntry.of(first, 3)])
    assert [move.owner for move in cache.pending_moves] == [first.kv]

    def fails(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patches:
        patches.setattr(cache, "reserve", fails)
        failed = recovery.launch([PassEntry.of(first, 1)])
    beside = recovery.launch([PassEntry.of(other, 2)])
    assert failed is not None
    assert beside is not None
    assert [part.applied for part in recovery.resolve(failed).requests] == [False]
    assert [part.applied for part in recovery.resolve(beside).requests] == [True]
    assert first.finish_reason is None
    recovery.stepper.step([PassEntry.of(first, 1)])
    target, text = HistoryTarget(), [1, 2, 3]
    for _ in first.output_ids:
        text.append(int(target.logits_after(text).argmax()))
    assert first.tokens == text
    assert len(first.output_ids) == 4
    cache.check_integrity()


def faults_of(target: OneFault) -> dict[str, int]:
    """Of an engine that launches every step before the last one has ended; its text is the right one."""
    core = core_on(target)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    request = ask(core, [1, 2, 3], params)
    under_way: deque[StepInFlight] = deque()
    while core.has_requests or under_way:
        while len(under_way) < 2 and (launched := core.launch()) is not None:
            under_way.append(launched)
        core.resolve(under_way.popleft())
    plain_core = core_on(OneFault(bad_pass=0))
    plain = ask(plain_core, [1, 2, 3], params)
    while plain_core.has_requests:
        plain_core.step()
    assert request.output_ids == plain.output_ids
    assert request.finish_reason == "length"
    core.check_integrity()
    return dict(core.faults)


class SlowDrafter(Drafter):
    """Takes 2 s for a guess."""

    def __init__(self, clock: ScriptedClock) -> None:
        self._clock = clock

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        self._clock.pass_by(2.0)
        return [Draft.chain([1], len(one.request.tokens)) for one in asks]

    def forget(self, request: DraftRequest) -> None:
        """Nothing is kept."""


class SlowTarget(CheckedTarget):
    """Takes 3 s for a pass; its second fails, if any does."""

    def __init__(self, clock: ScriptedClock, fails: bool) -> None:
        super().__init__(Saboteur(random.Random(0), 0.0))
        self._clock, self._fails, self._begun = clock, fails, 0

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        self._clock.pass_by(3.0)
        self._begun += 1
        if self._begun == 2 and self._fails:
            raise RuntimeError("planted")
        return super().forward(batch, store)


@pytest.mark.parametrize("fails_late", [False, True])
def test_the_time_of_tries_that_failed_is_booked(fails_late: bool, monkeypatch: pytest.MonkeyPatch):
    """Before the pass is handed over, or when it is judged."""
    clock = ScriptedClock()
    core = core_on(
        SlowTarget(clock, fails=not fails_late),
        policy=FixedPolicy(SlowDrafter(clock), 4),
        max_draft_share=9.0,
        clock=clock,
    )
    request = ask(core, [1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    core.step()
    before = core.seconds
    if fails_late:
        real, calls = Judging.verdicts, itertools.count()

        def fails_once(judging: Judging) -> Verdicts:
            if next(calls) == 0:
                raise RuntimeError("planted")
            return real(judging)

        monkeypatch.setattr(Judging, "verdicts", fails_once)
    core.step()
    spent = core.seconds - before
    assert core.faults == {"step": 1}
    assert spent.total == 2.0 + 3.0 + 3.0
    assert (spent.draft, spent.verify) == ((2.0, 6.0) if fails_late else (0.0, 3.0))
    assert request.accounting.seconds == core.seconds


class SmallDevice(HistoryTarget):
    """Has no memory for passes over many rows."""

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        if len(batch.token_ids) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")
        return super().forward(batch, store)


def test_a_pass_that_finds_no_memory_costs_those_alone_who_need_it(caplog: pytest.LogCaptureFixture):
    cache = PagedCache(30)
    requests = [lone_request([1] * length, vocab_size=11) for length in (9, 14, 9)]
    for request in requests:
        request.kv = cache.open()
    stepper = Stepper(SmallDevice(), cache, FixedPolicy())
    recovery = Recovery(stepper)
    under_way = recovery.launch([PassEntry.of(request, request.uncomputed) for request in requests])
    assert under_way is not None
    recovery.resolve(under_way)
    assert [request.finish_reason for request in requests] == [None, "error", None]
    assert requests[1].answer.error == (
        "the device has no memory left for this request; lower --gpu-memory-utilization or --max-num-batched-tokens"
    )
    assert [len(request.output_ids) for request in requests] == [1, 0, 1]
    assert "Traceback" not in caplog.text
    cache.check_integrity()
