"""A shift observed on servers that answer as the test says."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from foreword.bench.learning.shift import ShiftReport, ShiftSettings, TimedAnswer, observe_shift
from foreword.bench.learning.traffic import ShiftedTraffic
from foreword.errors import RequestError
from helpers.clocks import ScriptedClock

SETTINGS = ShiftSettings(utilization=0.5, round_requests=10, rounds=2, seconds=1000.0)


class Server:
    """Answers every request in `latency` seconds, and a round in ten seconds."""

    def __init__(
        self, clock: ScriptedClock, latency: float, reports: Sequence[tuple[str, int | None]] = ()
    ) -> None:
        self.clock, self.latency, self.reports = clock, latency, list(reports)
        self.sent: list[tuple[list[str], float | None]] = []
        self.times: list[float] = []  # when the rounds were sent
        self.is_stopped = False
        self.odd_prompts: set[str] = set()
        self.beside: Server | None = None  # the server that learns, beside one that does not
        self.compared: list[bool] = []  # for every round, whether that one was stopped

    def answer(self, prompts: Sequence[str], rate: float | None, seed: int) -> list[TimedAnswer]:
        assert not self.is_stopped
        self.compared.append(self.beside is not None and self.beside.is_stopped)
        self.sent.append((list(prompts), rate))
        self.times.append(self.clock.now)
        self.clock.pass_by(10.0)
        return [TimedAnswer(self._text(prompt), self.latency) for prompt in prompts]

    def _text(self, prompt: str) -> str:
        return f"another {prompt}" if prompt in self.odd_prompts else prompt

    def learning(self) -> dict[str, Any]:
        state, version = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        is_trained = version is not None or state == "rolling out"
        versions = [{"number": 1, "stage": "shadow", "reason": "new"}] if is_trained else []
        return {"state": state, "version": version, "versions": versions, "reason": ""}

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.is_stopped = True
        yield
        self.is_stopped = False


def observed(
    reports: Sequence[tuple[str, int | None]], settings: ShiftSettings = SETTINGS
) -> tuple[ShiftReport, Server, Server]:
    clock, traffic = ScriptedClock(), ShiftedTraffic.of("sql", 12, 100, 2, seed=0)
    static, learning = Server(clock, 0.5), Server(clock, 0.6, reports)
    static.beside = learning
    learning.odd_prompts = {traffic.after[13]}
    report = observe_shift(static, learning, traffic, settings, lambda *_: None, clock, clock.pass_by)
    return report, static, learning


def test_rounds_are_compared_while_a_training_runs_and_it_ends_with_a_version_in_use():
    before = [("collecting", None)] * 3  # at the shift, before and after the first round
    training = [("training", None), ("paused", None), ("training", None), ("training", None)]
    report, static, learning = observed([*before, *training, *[("rolling out", None)] * 3, ("collecting", 1)])
    assert report.rate == 1.0  # half of two requests per second
    assert (report.rounds, report.requests) == (2, 50)
    assert report.seconds == report.on_seconds == 50.0, "rounds of the static server do not count"
    assert report.trained_seconds == 40.0
    assert report.version == 1
    assert (report.compared_texts, report.same_texts) == (20, 19)
    assert report.p95_ratio == pytest.approx(1.2)
    assert static.compared == [False] * 3 + [True] * 2, "a training takes no time from the other server"
    first, second = zip(static.times[-2:], learning.times[-4:-2], strict=True)
    assert first[0] > first[1] and second[0] < second[1], "the order changes"
    compared = static.sent[-2:]
    assert compared == learning.sent[-4:-2], "the same requests at the same rate"


def test_without_a_version_it_ends_with_the_prompts_or_the_time():
    report, _, _ = observed([("collecting", None)])
    assert (report.requests, report.on_seconds, report.version) == (100, None, None)
    assert (report.rounds, report.p95_ratio) == (0, None)
    assert report.stage == ""
    hurried = ShiftSettings(utilization=0.5, round_requests=10, rounds=2, seconds=25.0)
    report, _, _ = observed([("training", None)], hurried)
    assert (report.requests, report.rounds) == (30, 2)
    assert report.state == "training"


def test_the_end_of_a_training_is_awaited_when_the_prompts_are_used_up():
    reports = [("training", None)] * (1 + 2 * 10) + [("paused", None)] * 4 + [("rolling out", None)]
    report, _, learning = observed(reports)
    assert (report.requests, report.state) == (100, "rolling out")
    assert report.seconds == 10 * 10.0 + 5.0
    assert report.stage == "version 1: shadow (new)"
    assert len(learning.sent) == 11


def test_a_version_of_before_the_shift_does_not_count():
    report, _, _ = observed([("collecting", 3)] * 5 + [("collecting", 4)])
    assert (report.version, report.requests) == (4, 30)


@pytest.mark.parametrize(
    ("option", "value"), [("utilization", 1.0), ("utilization", 0.0), ("round_requests", 1), ("rounds", -1)]
)
def test_settings_without_sense_are_refused(option: str, value: float):
    with pytest.raises(RequestError, match="--" + option.replace("_", "-")):
        ShiftSettings(**{option: value})  # type: ignore[arg-type]
