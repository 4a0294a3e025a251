"""Identifies what limits the speed-up, with figures and a recommendation. No recommendation changes the output."""

from collections.abc import Iterator
from dataclasses import dataclass

from foreword.control.reporting.figures import ControlReport, PairReport

LEAST_DRAFT_REQUESTS = 50
"""Minimum draft requests of a drafter in a cohort before its figures are judged."""

LOW_YIELD = 1.2  # tokens per pass with a draft
# Coverage is the fraction of draft requests that got a draft.
LOW_COVERAGE = 0.1
HIGH_COVERAGE = 0.5
NEARLY_FULL_COVERAGE = 0.9
MISMATCHED_ACCEPTANCE = (
    0.3  # acceptance rate of first draft tokens below which drafter and target do not match
)
HIGH_HOST_SHARE = 0.1  # fraction of step time
PREEMPTION_RATIO = 1.2  # preemptions with drafts / without
RARE_PREEMPTIONS = 0.01  # per second
BREAK_EVEN_SPEED = 1.0  # ratio to plain decoding


@dataclass(frozen=True)
class Advice:
    """A problem of one drafter in one cohort or of the whole engine, and what to change."""

    mode: str  # name of the problem
    what: str  # description with figures
    change: str  # recommendation
    drafter: str = ""  # empty: the advice concerns the engine
    cohort: str = ""


def advise(report: ControlReport) -> list[Advice]:
    """Return advice: about the engine, then about each drafter in a cohort that has measurements and no gain."""
    if not report.enabled:
        what = "speculation is switched off for all requests"
        return [Advice("switched off", what, 'POST /speculation {"enabled": true}')]
    advice = list(_engine_advice(report))
    for pair in report.pairs:
        advice += [Advice(*problem, pair.drafter, pair.cohort) for problem in _pair_problems(pair, report)]
    return advice


def without_advice(report: ControlReport) -> str:
    """Return in one sentence why `advise` returns nothing."""
    measured = [pair for pair in report.pairs if pair.asks >= LEAST_DRAFT_REQUESTS]
    if not measured:
        highest = max((pair.asks for pair in report.pairs), default=0)
        return (
            f"too little is measured yet: the busiest drafter has {highest} draft requests in a cohort, "
            f"and advice needs {LEAST_DRAFT_REQUESTS}"
        )
    slower = [f"{pair.drafter} for {pair.cohort}" for pair in measured if not _is_faster(pair)]
    if slower:
        return (
            f"plain decoding is as fast as {', '.join(slower)} and is used there; no single cause stands out"
        )
    return "no change is needed: speculation is faster than plain decoding wherever it was measured"


def _is_faster(pair: PairReport) -> bool:
    """Whether the pair is at least as fast as plain decoding: measured or, if in use, expected."""
    if pair.measured is not None:
        return pair.measured.mean >= BREAK_EVEN_SPEED
    return pair.in_use and pair.predicted is not None and pair.predicted.mean >= BREAK_EVEN_SPEED


def _engine_advice(report: ControlReport) -> Iterator[Advice]:
    speculative, plain = report.preemptions_guessing, report.preemptions_plain  # preemptions per second
    if speculative > max(RARE_PREEMPTIONS, PREEMPTION_RATIO * plain):
        yield Advice(
            "KV pressure",
            f"{speculative:.2f} preemptions a second with speculation, {plain:.2f} without; "
            f"{report.provisional_peak} of {report.kv_pages} pages were held for draft tokens",
            "fewer draft tokens (max_depth), fewer requests at once (--max-num-seqs), or more --kv-cache-memory-bytes",
        )
    if report.host_share > HIGH_HOST_SHARE:
        yield Advice(
            "host overhead",
            f"{report.host_share:.0%} of the time of steps is neither drafting nor the target's pass",
            "fewer draft tokens per step, fewer logprobs, or the compiled kernels (foreword doctor)",
        )


def _pair_problems(pair: PairReport, report: ControlReport) -> Iterator[tuple[str, str, str]]:
    """Yield (name, description, recommendation) of each problem of a drafter in a cohort."""
    if pair.state == "held":
        yield (
            "held",
            f"it was rolled back: {pair.reason}",
            "remove the cause, then give the roll-out another salt or set its state by hand",
        )
        return
    if pair.asks < LEAST_DRAFT_REQUESTS or _is_faster(pair):
        return
    coverage, rates = pair.coverage or 0.0, pair.acceptance_by_level
    if pair.is_model and coverage >= NEARLY_FULL_COVERAGE and rates and rates[0] < MISMATCHED_ACCEPTANCE:
        yield (
            "wrong pairing",
            f"{coverage:.0%} of draft requests get a draft, and {rates[0]:.0%} of first draft tokens are accepted",
            "use a drafter of the same family and tokenizer, or train a head on this model's own texts",
        )
    if pair.coverage is not None and coverage < LOW_COVERAGE:
        yield (
            "few drafts",
            f"{coverage:.1%} of {pair.asks} draft requests got a draft",
            "a shorter match (prompt_lookup_min), a datastore of such texts (rest), or a head or model instead",
        )
    if coverage > HIGH_COVERAGE and pair.tokens_per_draft < LOW_YIELD:
        yield (
            "low yield",
            f"{pair.tokens_per_draft:.2f} tokens per pass with a draft; {coverage:.0%} of its draft requests get one",
            "a better drafter for these texts (a head trained on them), or none for this cohort",
        )
    if pair.network_ms is not None and pair.network_ms > pair.draft_ms - pair.network_ms:
        yield (
            "network slower than drafting",
            f"{pair.network_ms:.1f} of {pair.draft_ms:.1f} ms of a draft request are spent on the network",
            "run the drafter on the target's machine, or raise num_speculative_tokens so that a round trip brings more",
        )
    if not report.step_ms:
        return
    # Every token that a draft adds saves one request's share of a plain step.
    share_ms = report.step_ms / max(report.batch, 1)
    saved_ms = coverage * (pair.tokens_per_draft - 1) * share_ms
    if pair.draft_ms > saved_ms:
        yield (
            "drafter too slow",
            f"a draft takes {pair.draft_ms:.2f} ms and saves {saved_ms:.2f} ms "
            f"of a plain step of {report.step_ms:.2f} ms",
            "a smaller drafter, fewer levels (num_speculative_tokens), 8 bits, or a head instead of a model",
        )
    first_saved_ms = rates[0] * share_ms if rates else 0.0
    if report.row_ms > first_saved_ms:
        yield (
            "no idle arithmetic at this batch",
            f"one more token in a pass takes {report.row_ms:.3f} ms and a first draft token saves "
            f"{first_saved_ms:.3f} ms at batch {report.batch:.0f}",
            "set disable_by_batch_size so that only smaller batches draft, or spread the requests over more devices",
        )
