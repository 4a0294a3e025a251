"""Recovers from failed steps: retries without drafts, then one request at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from foreword.backends.memory import release_cached_memory
from foreword.errors import EngineStopped
from foreword.speculation.pipeline import Launched
from foreword.speculation.proposing import NO_CALL, Proposal, plain_plans
from foreword.speculation.report import RequestReport, StageSeconds, StepReport
from foreword.speculation.requests import NOTHING_DRAWN, PassEntry, Verdict
from foreword.speculation.step import Stepper


class StepInFlight(NamedTuple):
    """A launched step that is not resolved yet. A failed launch is recovered when it is resolved."""

    entries: Sequence[PassEntry]
    launched: Launched | Exception  # an exception: the launch failed
    launch_seconds: float  # time of the launch, also of a failed one


@dataclass(frozen=True)
class Recovery:
    """Runs steps and retries failed ones, so that only a request that fails even alone gets an error.

    `EngineStopped` is not recovered: the process that runs the passes has ended.
    """

    stepper: Stepper

    def launch(self, entries: Sequence[PassEntry]) -> StepInFlight | None:
        """Launch a step; exceptions of a request, a drafter or the target are deferred to `resolve`.

        Return None if entries depend on a pass in flight and the launch failed: launch them again after that pass.
        """
        began = self.stepper.clock()
        follows_a_pass = any(entry.kv.passes for entry in entries)
        try:
            launched: Launched | Exception = self.stepper.launch(entries)
        except EngineStopped:
            raise
        except Exception as error:
            if follows_a_pass:
                self.stepper.faults.note("ahead", error)
                return None
            # Keep other steps from using these sequences before this one is resolved.
            for entry in entries:
                entry.kv.begin_pass()
            # This failure must not make the entries count as lost by an earlier pass.
            entries = [entry._replace(losses=entry.kv.losses) for entry in entries]
            launched = error
        return StepInFlight(entries, launched, self.stepper.clock() - began)

    def resolve(self, in_flight: StepInFlight) -> StepReport:
        """Wait for a step, retry it if it failed, and return one report that includes all tries."""
        began = self.stepper.clock()
        # If an earlier step failed and thereby lost entries of this one, that step has retried them.
        present = [entry for entry in in_flight.entries if entry.is_present]
        try:
            if isinstance(in_flight.launched, Exception):
                for entry in present:
                    entry.kv.end_pass()
                raise in_flight.launched
            return self.stepper.resolve(in_flight.launched)
        except Exception as error:
            self._note("step", error)
        later = self.stepper.pipeline.newest  # still in flight; the retry must not replace it
        # A sequence whose rows a later pass moves waits for the next step.
        free = [entry.again() for entry in present if not self.stepper.cache.is_busy(entry.kv)]
        reports = self._retry(free) if free else []
        self.stepper.pipeline.newest = later
        return _merged(in_flight, reports, in_flight.launch_seconds + self.stepper.clock() - began)

    def _retry(self, present: Sequence[PassEntry]) -> list[StepReport]:
        """Run the entries without drafts: all in one step or, if that fails too, each alone."""
        try:
            return [self._step_plainly(present)]
        except EngineStopped:
            raise
        except Exception as error:
            self._note("plain step", error)
        return [self._step_alone(entry) for entry in present]

    def _step_plainly(self, entries: Sequence[PassEntry]) -> StepReport:
        """Run one step without drafts."""
        return self.stepper.resolve(self.stepper.launch(entries, plain_plans(entries)))

    def _step_alone(self, entry: PassEntry) -> StepReport:
        """Run one entry without a draft; end its answer with an error if that fails."""
        try:
            return self._step_plainly([entry.again()])
        except EngineStopped:
            raise
        except Exception as error:
            self._note("request", error)
            message = _message_of(error)
            entry.request.fail(message)
            return StepReport([RequestReport(entry.request, Verdict(error=message))])

    def _note(self, stage: str, error: Exception) -> None:
        """Count a fault; after an out-of-memory error release cached memory, which may suffice for the next try."""
        self.stepper.faults.note(stage, error)
        if isinstance(error, torch.OutOfMemoryError):
            release_cached_memory()


def _message_of(error: Exception) -> str:
    """Return the error message for a request that fails even alone."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "the device has no memory left for this request; "
            "lower --gpu-memory-utilization or --max-num-batched-tokens"
        )
    return f"the model failed on this request: {type(error).__name__}: {error}"


def _merged(failed: StepInFlight, reports: Sequence[StepReport], seconds: float) -> StepReport:
    """Return one report of a failed step and its retries, in the order of the failed step.

    `seconds` is the time of all tries. The first try adds its drafter calls and their times.
    """
    proposal = Proposal() if isinstance(failed.launched, Exception) else failed.launched.proposal
    verified = 0.0 if isinstance(failed.launched, Exception) else failed.launched.probe.verify_seconds
    shares = proposal.shares or [NO_CALL] * len(failed.entries)
    by_request = {result.request.request_id: result for report in reports for result in report.requests}
    results = []
    for entry, share in zip(failed.entries, shares, strict=True):
        dropped = RequestReport(entry.request, NOTHING_DRAWN, applied=False)
        result = by_request.get(entry.request.request_id, dropped)
        results.append(result._replace(draft_seconds=result.draft_seconds + share.seconds))
    spent = sum((report.seconds for report in reports), StageSeconds(proposal.seconds, verified))
    return StepReport(
        results,
        [*proposal.calls, *(call for report in reports for call in report.calls)],
        replace(spent, total=seconds),
        passes=1 + len(reports),
    )
