"""Rates, ratios and how sure they are."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from foreword.bench.compare.contestants import OURS, PLAIN, Contestant
from foreword.bench.compare.race import Answer
from foreword.bench.control.statistics import Interval, bootstrap

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Row:
    """One contestant."""

    label: str
    tokens_per_second: float  # median while decoding
    ratio: Interval  # to the baseline, answers of the same prompt and round beside each other
    first_ms: float  # median time to the first token
    peak_bytes: int
    same_as_plain: (
        float | None
    )  # share of answers with the text of the same weights without guesses; None without guesses

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def baseline(answers: Sequence[Answer], contestants: Sequence[Contestant]) -> str:
    """The fastest plain peer that took part; ourselves if there is no other."""
    labels = {answer.contestant for answer in answers}
    others = [c.label for c in contestants if c.is_plain and c.peer != OURS and c.label in labels]
    return max(others, key=lambda label: _speed(answers, label), default=f"{OURS} {PLAIN}")


def summarise(answers: Sequence[Answer], contestants: Sequence[Contestant]) -> tuple[str, list[Row]]:
    """The baseline's label and a row for everybody who took part."""
    beside = baseline(answers, contestants)
    rows = []
    for contestant in contestants:
        own = [answer for answer in answers if answer.contestant == contestant.label]
        if own:
            rows.append(_row(contestant, own, answers, beside))
    return beside, rows


def _row(contestant: Contestant, own: Sequence[Answer], answers: Sequence[Answer], beside: str) -> Row:
    other = {(a.prompt, a.round): a.tokens_per_second for a in answers if a.contestant == beside}
    ratios = [answer.tokens_per_second / other[answer.prompt, answer.round] for answer in own]
    texts = {a.prompt: a.token_ids for a in answers if a.contestant == contestant.plain_label}
    same = sum(answer.token_ids == texts.get(answer.prompt) for answer in own) / len(own)
    return Row(
        contestant.label,
        _speed(answers, contestant.label),
        bootstrap(ratios, CONFIDENCE),
        1000 * median(answer.first_seconds for answer in own),
        max(answer.peak_bytes for answer in own),
        None if contestant.is_plain else same,
    )


def _speed(answers: Sequence[Answer], label: str) -> float:
    return median(answer.tokens_per_second for answer in answers if answer.contestant == label)
