"""Steps that survive faults: tried again without guesses, then one request at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.speculation.report import RequestReport, StageSeconds, StepReport
from foreword.speculation.requests import PassEntry
from foreword.speculation.step import Launched, Stepper, plain
from foreword.speculation.verdict import NOTHING_DRAWN, Verdict


@dataclass(frozen=True)
class UnderWay:
    """A step between its two halves; a launch that failed is recovered from when it is resolved."""

    entries: Sequence[PassEntry]
    launched: Launched | Exception


@dataclass(frozen=True)
class Recovery:
    """Runs a stepper's steps so that only requests that fail alone are given up."""

    stepper: Stepper

    def launch(self, entries: Sequence[PassEntry]) -> UnderWay:
        """Does not raise for what a request, a drafter or the target did."""
        try:
            return UnderWay(entries, self.stepper.launch(entries))
        except Exception as error:
            # No other step may take these up before this one is resolved.
            self.stepper.cache.hold_back([entry.kv for entry in entries])
            return UnderWay(entries, error)

    def resolve(self, under_way: UnderWay) -> StepReport:
        """The step's report; of several passes if it had to be tried again."""
        try:
            if isinstance(under_way.launched, Exception):
                self.stepper.cache.end_pass([entry.kv for entry in under_way.entries])
                raise under_way.launched
            return self.stepper.resolve(under_way.launched)
        except Exception as error:
            self.stepper.faults.note("step", error)
        present = [e.again() for e in under_way.entries if self.stepper.cache.is_open(e.kv)]
        return _merged(under_way.entries, self._again(present) if present else [])

    def _again(self, present: Sequence[PassEntry]) -> list[StepReport]:
        try:
            return [self._plainly(present)]
        except Exception as error:
            self.stepper.faults.note("plain step", error)
        return [self._alone(entry) for entry in present]

    def _plainly(self, entries: Sequence[PassEntry]) -> StepReport:
        return self.stepper.resolve(self.stepper.launch(entries, plain(entries)))

    def _alone(self, entry: PassEntry) -> StepReport:
        try:
            return self._plainly([entry.again()])
        except Exception as error:
            self.stepper.faults.note("request", error)
            message = f"the model failed on this request: {type(error).__name__}: {error}"
            entry.request.fail(message)
            return StepReport([RequestReport(entry.request, Verdict(error=message))])


def _merged(entries: Sequence[PassEntry], reports: Sequence[StepReport]) -> StepReport:
    """The reports of several smaller steps as one, in the order of the whole."""
    found = {part.request.request_id: part for report in reports for part in report.requests}
    gone = {e.request.request_id: RequestReport(e.request, NOTHING_DRAWN, applied=False) for e in entries}
    return StepReport(
        [found.get(name, part) for name, part in gone.items()],
        [call for report in reports for call in report.calls],
        sum((report.seconds for report in reports), StageSeconds()),
        passes=1 + len(reports),
    )
