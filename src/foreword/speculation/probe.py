"""Step instrumentation: timing, reports and recovered faults."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.speculation.proposing import NO_CALL, Proposal
from foreword.speculation.protocols import Target
from foreword.speculation.report import RequestReport, StageSeconds, StepReport
from foreword.speculation.requests import PassEntry, Verdict

_log = logging.getLogger(__name__)


class StepProbe:
    """Times one step, records whether it was cold, and creates its report."""

    __slots__ = ("_began", "_clock", "is_cold", "launch_seconds", "verify_seconds")

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start the clock of the launch."""
        self._clock, self._began = clock, clock()
        self.launch_seconds = 0.0  # the whole launch
        self.verify_seconds = 0.0  # launching the pass; on a CPU, running it
        self.is_cold = False  # whether the pass or an early draft compiled or captured a graph

    def forward(self, target: Target, batch: ForwardBatch) -> ForwardOutput:
        """Run the pass and time it."""
        began = self._clock()
        output = target.forward(batch)
        self.verify_seconds = self._clock() - began
        self.is_cold = output.is_cold
        return output

    def end_launch(self) -> None:
        """Record the time of the launch."""
        self.launch_seconds = self._clock() - self._began

    def start_resolving(self) -> None:
        """Restart the clock when the step is resolved; the time since its launch belongs to other steps."""
        self._began = self._clock()

    def report(
        self,
        entries: Sequence[PassEntry],
        proposal: Proposal,
        verdicts: Sequence[Verdict],
        applied: Sequence[bool],
    ) -> StepReport:
        """Return the report of the committed step; `finish` adds its times."""
        proposal = proposal.with_device_times()
        shares = proposal.shares or [NO_CALL] * len(entries)
        results = [
            RequestReport(
                entry.request,
                verdict,
                entry.run,
                entry.computed,
                entry.draws,
                share.method,
                share.seconds,
                was_applied,
            )
            for entry, verdict, share, was_applied in zip(entries, verdicts, shares, applied, strict=True)
        ]
        report = StepReport(results, proposal.calls, StageSeconds(proposal.seconds))
        report.is_cold = self.is_cold or proposal.is_cold
        return report

    def finish(self, report: StepReport) -> StepReport:
        """Set the report's times, which include the notification of drafters; return it."""
        accepting = self._clock() - self._began
        total = self.launch_seconds + accepting
        report.seconds = replace(report.seconds, verify=self.verify_seconds, accept=accepting, total=total)
        return report


class FaultLog:
    """Counts recovered faults by stage, and logs the first of each stage."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, stage: str, error: BaseException) -> None:
        """Count a fault from which the step recovers, at the cost of drafts or a retry; log the first of a stage."""
        self.counts[stage] += 1
        if self.counts[stage] == 1:
            # The traceback of an out-of-memory error is not informative.
            trace = None if isinstance(error, torch.OutOfMemoryError) else error
            _log.error("a %s failed and is recovered from: %s", stage, error, exc_info=trace)

    def suppressed(self, stage: str) -> "_Suppressed":
        """Return a context manager that records an exception and suppresses it."""
        return _Suppressed(self, stage)


class _Suppressed:
    """Context manager of `FaultLog.suppressed`; `contextlib.contextmanager` would take three times as long."""

    __slots__ = ("_log", "_stage")

    def __init__(self, log: FaultLog, stage: str) -> None:
        self._log, self._stage = log, stage

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._log.note(self._stage, error)
            return True
        return False
