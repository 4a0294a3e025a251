"""What is in the way of a gain, with its figures, and what to change. Nothing here changes a text."""

from collections.abc import Callable
from dataclasses import dataclass

from foreword.control.reporting.figures import ControlReport, PairReport

LEAST_ASKS = 50
"""Asks of a pair below which nothing is said of it."""

LOW_YIELD = 1.2
FEW = 0.1
MANY = 0.5
NEARLY_ALWAYS = 0.9
MISMATCHED = 0.3
HOST = 0.1
PRESSURE = 1.2
RARE_PREEMPTIONS = 0.01  # per second
PAYS = 1.0


@dataclass(frozen=True)
class Advice:
    """A failure mode of one pair, or of the whole engine."""

    mode: str
    what: str  # is the case, with figures
    change: str
    drafter: str = ""  # empty: of the engine
    cohort: str = ""


def advise(report: ControlReport) -> list[Advice]:
    """The most decisive first; nothing where guessing pays or too little is known."""
    if not report.enabled:
        return [
            Advice(
                "switched off",
                "guessing is switched off for everybody",
                'POST /speculation {"enabled": true}',
            )
        ]
    found = [one for look in _OF_ENGINE if (one := look(report)) is not None]
    for pair in report.pairs:
        found += _of_pair(pair, report)
    return found


def _of_pair(pair: PairReport, report: ControlReport) -> list[Advice]:
    if pair.state == "held":
        return [
            _told(
                "held",
                pair,
                f"it was rolled back: {pair.reason}",
                "mend the cause, then give the roll-out another salt, or move it by hand",
            )
        ]
    if pair.asks < LEAST_ASKS or _pays(pair):
        return []
    return [one for look in _OF_PAIR if (one := look(pair, report)) is not None]


def _pays(pair: PairReport) -> bool:
    if pair.measured is not None:
        return pair.measured.mean >= PAYS
    return pair.in_use and pair.predicted is not None and pair.predicted.mean >= PAYS


def _told(mode: str, pair: PairReport, what: str, change: str) -> Advice:
    return Advice(mode, what, change, pair.drafter, pair.cohort)


def _wrong_pairing(pair: PairReport, report: ControlReport) -> Advice | None:
    first = pair.acceptance_by_level[0] if pair.acceptance_by_level else 1.0
    if not pair.is_model or (pair.coverage or 0.0) < NEARLY_ALWAYS or first >= MISMATCHED:
        return None
    return _told(
        "wrong pairing",
        pair,
        f"it always has a guess ({pair.coverage:.0%} of asks) and only {first:.0%} of the first ones are right",
        "take a drafter of the same family and tokenizer, or train a head on this model's own texts",
    )


def _rarely(pair: PairReport, report: ControlReport) -> Advice | None:
    if pair.coverage is None or pair.coverage >= FEW:
        return None
    return _told(
        "rarely has a guess",
        pair,
        f"it had something to say for {pair.coverage:.1%} of {pair.asks} asks",
        "a shorter match (prompt_lookup_min), a datastore of such texts (rest), or a head or model instead",
    )


def _low_yield(pair: PairReport, report: ControlReport) -> Advice | None:
    if (pair.coverage or 0.0) <= MANY or pair.tokens_per_draft >= LOW_YIELD:
        return None
    return _told(
        "low yield",
        pair,
        f"{pair.tokens_per_draft:.2f} tokens from a pass with its guesses, at {pair.coverage:.0%} coverage",
        "a better drafter for these texts (a head trained on them), or none for this cohort",
    )


def _network(pair: PairReport, report: ControlReport) -> Advice | None:
    if pair.network_ms is None or pair.network_ms <= pair.draft_ms - pair.network_ms:
        return None
    return _told(
        "network slower than drafting",
        pair,
        f"{pair.network_ms:.1f} of {pair.draft_ms:.1f} ms of an ask are on the way",
        "bring the drafter to the target's machine, or guess deeper per round trip",
    )


def _too_slow(pair: PairReport, report: ControlReport) -> Advice | None:
    gained = (pair.coverage or 0.0) * (pair.tokens_per_draft - 1) * report.step_ms / max(report.batch, 1)
    per_request = pair.draft_ms
    if not report.step_ms or per_request <= gained:
        return None
    return _told(
        "drafter too slow",
        pair,
        f"an ask takes {per_request:.2f} ms and saves {gained:.2f} ms of a plain step of {report.step_ms:.2f} ms",
        "a smaller drafter, fewer levels (num_speculative_tokens), 8 bits, or a head instead of a model",
    )


def _no_idle_arithmetic(pair: PairReport, report: ControlReport) -> Advice | None:
    first = pair.acceptance_by_level[0] if pair.acceptance_by_level else 0.0
    worth = first * report.step_ms / max(report.batch, 1)
    if not report.step_ms or report.row_ms <= worth:
        return None
    return _told(
        "no idle arithmetic at this batch",
        pair,
        f"a row takes {report.row_ms:.3f} ms and a first guess is worth {worth:.3f} ms at batch {report.batch:.0f}",
        "nothing to mend: guesses pay at smaller batches; disable_by_batch_size, or more devices",
    )


def _kv_pressure(report: ControlReport) -> Advice | None:
    guessing, plain = report.preemptions_guessing, report.preemptions_plain
    if guessing <= RARE_PREEMPTIONS or guessing <= PRESSURE * plain:
        return None
    return Advice(
        "KV pressure",
        f"{guessing:.2f} preemptions a second while guessing, {plain:.2f} without; "
        f"{report.provisional_peak} of {report.kv_pages} pages were held for guesses",
        "fewer guesses (max_depth), fewer requests at once (--max-num-seqs), or more --kv-cache-memory-bytes",
    )


def _host_overhead(report: ControlReport) -> Advice | None:
    if report.host_share <= HOST:
        return None
    return Advice(
        "host overhead",
        f"{report.host_share:.0%} of the time of steps is neither drafting nor the target's pass",
        "fewer guesses per step, fewer logprobs, or the compiled kernels (foreword doctor)",
    )


_OF_ENGINE: tuple[Callable[[ControlReport], Advice | None], ...] = (_kv_pressure, _host_overhead)
_OF_PAIR: tuple[Callable[[PairReport, ControlReport], Advice | None], ...] = (
    _wrong_pairing,
    _rarely,
    _low_yield,
    _network,
    _too_slow,
    _no_idle_arithmetic,
)
