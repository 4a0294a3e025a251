"""Identifies what limits the speed-up, with figures and a recommendation. No recommendation changes the output."""

from collections.abc import Callable
from dataclasses import dataclass

from foreword.control.reporting.figures import ControlReport, PairReport

LEAST_DRAFT_REQUESTS = 50
"""Minimum draft requests of a drafter in a cohort before its figures are judged."""

LOW_YIELD = 1.2  # tokens per pass with a draft
LOW_COVERAGE = 0.1  # fraction of draft requests that got a draft
HIGH_COVERAGE = 0.5
NEARLY_FULL_COVERAGE = 0.9
MISMATCHED_ACCEPTANCE = 0.3  # of first draft tokens, if drafter and target do not fit
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
        return [
            Advice(
                "switched off",
                "speculation is switched off for all requests",
                'POST /speculation {"enabled": true}',
            )
        ]
    found = [one for check in _ENGINE_CHECKS if (one := check(report)) is not None]
    for pair in report.pairs:
        found += _pair_advice(pair, report)
    return found


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


def _pair_advice(pair: PairReport, report: ControlReport) -> list[Advice]:
    if pair.state == "held":
        return [
            _advice(
                "held",
                pair,
                f"it was rolled back: {pair.reason}",
                "remove the cause, then give the roll-out another salt or set its state by hand",
            )
        ]
    if pair.asks < LEAST_DRAFT_REQUESTS or _is_faster(pair):
        return []
    return [one for check in _PAIR_CHECKS if (one := check(pair, report)) is not None]


def _is_faster(pair: PairReport) -> bool:
    """Whether the pair is at least as fast as plain decoding: measured or, if in use, expected."""
    if pair.measured is not None:
        return pair.measured.mean >= BREAK_EVEN_SPEED
    return pair.in_use and pair.predicted is not None and pair.predicted.mean >= BREAK_EVEN_SPEED


def _advice(mode: str, pair: PairReport, what: str, change: str) -> Advice:
    return Advice(mode, what, change, pair.drafter, pair.cohort)


def _wrong_pairing(pair: PairReport, report: ControlReport) -> Advice | None:
    first = pair.acceptance_by_level[0] if pair.acceptance_by_level else 1.0
    if not pair.is_model or (pair.coverage or 0.0) < NEARLY_FULL_COVERAGE or first >= MISMATCHED_ACCEPTANCE:
        return None
    return _advice(
        "wrong pairing",
        pair,
        f"{pair.coverage:.0%} of draft requests get a draft, and {first:.0%} of first draft tokens are accepted",
        "use a drafter of the same family and tokenizer, or train a head on this model's own texts",
    )


def _few_drafts(pair: PairReport, report: ControlReport) -> Advice | None:
    if pair.coverage is None or pair.coverage >= LOW_COVERAGE:
        return None
    return _advice(
        "few drafts",
        pair,
        f"{pair.coverage:.1%} of {pair.asks} draft requests got a draft",
        "a shorter match (prompt_lookup_min), a datastore of such texts (rest), or a head or model instead",
    )


def _low_yield(pair: PairReport, report: ControlReport) -> Advice | None:
    if (pair.coverage or 0.0) <= HIGH_COVERAGE or pair.tokens_per_draft >= LOW_YIELD:
        return None
    return _advice(
        "low yield",
        pair,
        f"{pair.tokens_per_draft:.2f} tokens per pass with a draft; {pair.coverage:.0%} of its draft requests get one",
        "a better drafter for these texts (a head trained on them), or none for this cohort",
    )


def _network(pair: PairReport, report: ControlReport) -> Advice | None:
    if pair.network_ms is None or pair.network_ms <= pair.draft_ms - pair.network_ms:
        return None
    return _advice(
        "network slower than drafting",
        pair,
        f"{pair.network_ms:.1f} of {pair.draft_ms:.1f} ms of a draft request are spent on the network",
        "run the drafter on the target's machine, or raise num_speculative_tokens so that a round trip brings more",
    )


def _too_slow(pair: PairReport, report: ControlReport) -> Advice | None:
    saved_ms = (pair.coverage or 0.0) * (pair.tokens_per_draft - 1) * report.step_ms / max(report.batch, 1)
    if not report.step_ms or pair.draft_ms <= saved_ms:
        return None
    return _advice(
        "drafter too slow",
        pair,
        f"a draft takes {pair.draft_ms:.2f} ms and saves {saved_ms:.2f} ms of a plain step of {report.step_ms:.2f} ms",
        "a smaller drafter, fewer levels (num_speculative_tokens), 8 bits, or a head instead of a model",
    )


def _no_idle_arithmetic(pair: PairReport, report: ControlReport) -> Advice | None:
    first = pair.acceptance_by_level[0] if pair.acceptance_by_level else 0.0
    saved_ms = first * report.step_ms / max(report.batch, 1)
    if not report.step_ms or report.row_ms <= saved_ms:
        return None
    return _advice(
        "no idle arithmetic at this batch",
        pair,
        f"one more token in a pass takes {report.row_ms:.3f} ms and a first draft token saves {saved_ms:.3f} ms "
        f"at batch {report.batch:.0f}",
        "set disable_by_batch_size so that only smaller batches draft, or spread the requests over more devices",
    )


def _kv_pressure(report: ControlReport) -> Advice | None:
    speculative, plain = report.preemptions_guessing, report.preemptions_plain
    if speculative <= RARE_PREEMPTIONS or speculative <= PREEMPTION_RATIO * plain:
        return None
    return Advice(
        "KV pressure",
        f"{speculative:.2f} preemptions a second with speculation, {plain:.2f} without; "
        f"{report.provisional_peak} of {report.kv_pages} pages were held for draft tokens",
        "fewer draft tokens (max_depth), fewer requests at once (--max-num-seqs), or more --kv-cache-memory-bytes",
    )


def _host_overhead(report: ControlReport) -> Advice | None:
    if report.host_share <= HIGH_HOST_SHARE:
        return None
    return Advice(
        "host overhead",
        f"{report.host_share:.0%} of the time of steps is neither drafting nor the target's pass",
        "fewer draft tokens per step, fewer logprobs, or the compiled kernels (foreword doctor)",
    )


_ENGINE_CHECKS: tuple[Callable[[ControlReport], Advice | None], ...] = (_kv_pressure, _host_overhead)
_PAIR_CHECKS: tuple[Callable[[PairReport, ControlReport], Advice | None], ...] = (
    _wrong_pairing,
    _few_drafts,
    _low_yield,
    _network,
    _too_slow,
    _no_idle_arithmetic,
)
