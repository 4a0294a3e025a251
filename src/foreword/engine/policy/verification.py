"""Decodes ended requests again in idle time with a drafter being rolled out, and compares the answers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.control.policy_file.document import Stage
from foreword.control.rollout.distributions import Figures, figures_of
from foreword.control.rollout.pair import PairRollout
from foreword.engine.messages import NewRequest
from foreword.engine.policy.controller import PolicyFileController
from foreword.engine.policy.health import is_of
from foreword.engine.requests.request import Assignment, Request

MOST_WAITING = 8  # maximum number of ended requests kept for decoding again

LOGPROB_TOLERANCE = 1e-4  # difference of log-probabilities that counts as rounding
SECONDS_TOLERANCE = 0.01  # relative difference between accounted and measured time


@dataclass(frozen=True)
class Sample:
    """An ended request and its answer, to be decoded again with a drafter that is rolled out in its cohort."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tenant: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    logprobs: Sequence[TokenLogprobs]
    drafter: str
    cohort: str


@dataclass(frozen=True)
class ReplayTotals:
    """Free pages before and after a replay, and the seconds of its steps."""

    pages_before: int
    pages_after: int
    step_seconds: float  # total time of the steps of the replay


@dataclass
class IdleChecks:
    """Selects ended requests to decode again, and compares the answers.

    A sample is decoded once with the drafter. Where equal texts are not promised, it is first decoded without.
    """

    policy_file: PolicyFileController
    compares_texts: bool = True  # False: the acceptance rule preserves the distribution, not the text
    needs_plain: bool = False  # texts may depend on the number of tokens in a pass: decode plainly as well
    seeds: Random = field(default_factory=Random)  # for answers whose distribution is compared
    _waiting: deque[Sample] = field(default_factory=lambda: deque(maxlen=MOST_WAITING))
    _current: Sample | None = None  # the sample that is decoded now, or next
    _is_plain: bool = False  # whether the current replay decodes without the drafter
    _is_plain_different: bool = False  # whether the answer without the drafter differed from the served one
    _plain_figures: Figures | None = None  # of the answer without the drafter

    def ended(self, request: Request) -> None:
        """Keep a sample of an ended request for every roll-out that must be verified in its cohort."""
        if request.identity.index or request.finish_reason not in ("stop", "length") or request.prediction:
            return
        if request.identity.adapter is not None:  # the adapter may be unloaded by then
            return
        for (drafter, cohort), pair in self.policy_file.rollouts.pairs.items():
            if pair.stage is Stage.VERIFY and is_of(request.cohort, cohort):
                self._waiting.append(
                    Sample(
                        tuple(request.tokens[: request.prompt_len]),
                        replace(request.params, seed=request.sampler.seed, n=1),
                        request.tenant,
                        tuple(request.output_ids),
                        request.finish_reason,
                        tuple(request.answer.logprobs),
                        drafter,
                        cohort,
                    )
                )

    def next(self) -> tuple[NewRequest, Assignment] | None:
        """Return the replay to decode now and the decisions for it; None if no sample is waiting."""
        while self._current is None or self._pair(self._current) is None:
            if not self._waiting:
                self._current = None
                return None
            self._current = self._waiting.popleft()
            self._is_plain = self.needs_plain or not self._compares_text(self._current)
            self._is_plain_different = False
        sample = self._current
        request = NewRequest("check", sample.prompt, self._params(sample), sample.tenant)
        plan = None if self._is_plain else self.policy_file.fixed_plan(sample.drafter, sample.cohort)
        return request, Assignment(f"{sample.cohort}/check", plan, is_replay=True)

    def finished(self, request: Request, totals: ReplayTotals) -> None:
        """Compare the second answer with the served one, and report the result to the roll-out."""
        sample = self._current
        if sample is None:
            return
        if not self._compares_text(sample):
            self._compare_distribution(sample, request, totals)
            return
        difference = find_difference(sample, request) or find_imbalance(request, totals)
        if self._is_plain:
            self._is_plain, self._is_plain_different = False, difference is not None
            return
        self._current = None
        pair = self._pair(sample)
        if pair is not None:
            pair.add_comparison(difference, self._is_plain_different)
            self.policy_file.rollouts.save(is_due=pair.stage is not Stage.VERIFY)

    def _compare_distribution(self, sample: Sample, request: Request, totals: ReplayTotals) -> None:
        """Compare the distributions of answers without and with the drafter, sampled with new seeds."""
        fault = reason_unfinished(request) or find_imbalance(request, totals)
        if self._is_plain and fault is None:
            self._is_plain, self._plain_figures = False, _figures(request)
            return
        plain, pair, self._current = self._plain_figures, self._pair(sample), None
        if pair is not None and plain is not None and not self._is_plain:
            pair.add_samples(plain, _figures(request), fault)
            self.policy_file.rollouts.save(is_due=pair.stage is not Stage.VERIFY)

    def _compares_text(self, sample: Sample) -> bool:
        """Return whether texts are compared: greedy texts are equal under every rule."""
        return self.compares_texts or sample.params.temperature == 0

    def _params(self, sample: Sample) -> SamplingParams:
        """Return the parameters of the second decoding: those of the first, or a new seed to compare distributions."""
        if self._compares_text(sample):
            return sample.params
        wanted = sample.params.logprobs or 0
        return replace(sample.params, seed=self.seeds.getrandbits(63), logprobs=wanted)

    def _pair(self, sample: Sample) -> PairRollout | None:
        """Return the roll-out of a sample; None if the file has changed or the roll-out is no longer verified."""
        pair = self.policy_file.rollouts.pairs.get((sample.drafter, sample.cohort))
        is_in_file = sample.drafter in self.policy_file.configs
        return pair if pair is not None and pair.stage is Stage.VERIFY and is_in_file else None


def _figures(request: Request) -> Figures:
    """Return the figures of an answer by which distributions are compared."""
    logprobs = request.answer.logprobs
    return figures_of(
        request.output_ids, [token.logprob for token in logprobs], [token.rank for token in logprobs]
    )


def reason_unfinished(request: Request) -> str | None:
    """Return why the second answer did not end normally; None: it did."""
    if request.finish_reason in ("stop", "length"):
        return None
    return f"it ended with {request.finish_reason}: {request.answer.error}"


def find_difference(sample: Sample, request: Request) -> str | None:
    """Return how the second answer differs from the served one; None: it does not."""
    if (fault := reason_unfinished(request)) is not None:
        return fault
    again = tuple(request.output_ids)
    if again != sample.tokens:
        both = zip(again, sample.tokens, strict=False)
        index = next((i for i, (a, b) in enumerate(both) if a != b), min(len(again), len(sample.tokens)))
        return f"tokens differ from number {index} of {len(sample.tokens)} on"
    if request.finish_reason != sample.finish_reason:
        return f"finish reason {request.finish_reason} instead of {sample.finish_reason}"
    for index, (new, old) in enumerate(zip(request.answer.logprobs, sample.logprobs, strict=True)):
        if abs(new.logprob - old.logprob) > LOGPROB_TOLERANCE:
            return f"log probability of token {index} is {new.logprob:.5f} instead of {old.logprob:.5f}"
    return None


def find_imbalance(request: Request, totals: ReplayTotals) -> str | None:
    """Return the inconsistency in the accounting of a request that ran alone; None: there is none."""
    tokens, accepted = len(request.output_ids), request.acceptance.accepted
    if not accepted <= tokens <= accepted + request.accounting.passes:
        return f"accounting: {tokens} tokens of {accepted} accepted draft tokens in {request.accounting.passes} passes"
    if totals.pages_after != totals.pages_before:
        return f"accounting: {totals.pages_before} pages were available before and {totals.pages_after} after"
    billed = request.accounting.seconds.total
    if abs(billed - totals.step_seconds) > SECONDS_TOLERANCE * totals.step_seconds:
        return f"accounting: {billed:.4f} s were billed for steps of {totals.step_seconds:.4f} s"
    return None
