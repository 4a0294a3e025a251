"""From measurements to one row per drafter and category."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foreword.bench.drafters.decode import Run
from foreword.bench.drafters.records import Record, cpu_speedup

ALL = "all"
"""Name of the row over all categories."""


@dataclass(frozen=True)
class Row:
    """A drafter on one category of prompts. Sums over the prompts are compared, never ratios averaged."""

    drafter: str
    category: str
    prompts: int
    alpha: float | None  # guesses accepted, of those judged; None: nothing was guessed
    tau: float  # tokens per target pass while decoding
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float  # tokens per second relative to plain decoding of the same prompts
    draft_ms: float  # per step, like the three below
    verify_ms: float
    accept_ms: float
    rest_ms: float
    plain_step_ms: float  # a whole step of plain decoding
    memory_bytes: int | None  # most that the drafter said it adds
    different_texts: int  # answers that are not those of plain decoding: must be 0 but for ties in rounding
    # Time of draft and target together for a token: what is paid for, whoever computes it.
    device_ms_per_token: float
    plain_device_ms_per_token: float
    passes: int  # of the target, while decoding
    drafted_per_position: tuple[int, ...]  # drafts that have a guess at this place
    accepted_per_position: tuple[int, ...]  # drafts of which all guesses up to this place were committed
    cpu_speedup: float | None = None  # by the processor's time; None if it did not do the work

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(records: Sequence[Record]) -> list[Row]:
    """For every drafter its categories in order of appearance, then all of them together."""
    rows = []
    for drafter in _distinct([record.drafter for record in records]):
        own = [record for record in records if record.drafter == drafter]
        for category in _distinct([record.category for record in own]):
            rows.append(_row(drafter, category, [r for r in own if r.category == category]))
        rows.append(_row(drafter, ALL, own))
    return rows


def _row(drafter: str, category: str, records: Sequence[Record]) -> Row:
    guessing = [record.speculative for record in records]
    plain = [record.plain for record in records]
    steps = sum(run.passes for run in guessing)
    drafted = sum(run.drafted for run in guessing)
    sizes = [run.memory_bytes for run in guessing if run.memory_bytes is not None]

    def ms_per_step(seconds: float) -> float:
        return _share(1e3 * seconds, steps)

    return Row(
        drafter=drafter,
        category=category,
        prompts=len(records),
        alpha=sum(run.accepted for run in guessing) / drafted if drafted else None,
        tau=_share(sum(run.tokens for run in guessing), steps),
        plain_tokens_per_second=_rate(plain),
        tokens_per_second=_rate(guessing),
        speedup=_share(_rate(guessing), _rate(plain)) if _rate(plain) else 1.0,  # nothing to be faster at
        draft_ms=ms_per_step(sum(run.draft_seconds for run in guessing)),
        verify_ms=ms_per_step(sum(run.verify_seconds for run in guessing)),
        accept_ms=ms_per_step(sum(run.accept_seconds for run in guessing)),
        rest_ms=ms_per_step(sum(run.rest_seconds for run in guessing)),
        plain_step_ms=_share(1e3 * sum(run.seconds for run in plain), sum(run.passes for run in plain)),
        memory_bytes=max(sizes, default=None),
        different_texts=sum(not record.identical for record in records),
        device_ms_per_token=_device_ms(guessing),
        plain_device_ms_per_token=_device_ms(plain),
        passes=steps,
        drafted_per_position=summed([run.drafted_per_position for run in guessing]),
        accepted_per_position=summed([run.accepted_per_position for run in guessing]),
        cpu_speedup=cpu_speedup(records),
    )


def summed(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Place by place; some lists may be longer than others."""
    width = max((len(values) for values in lists), default=0)
    return tuple(sum(values[place] for values in lists if place < len(values)) for place in range(width))


def _device_ms(runs: Sequence[Run]) -> float:
    busy = sum(run.draft_seconds + run.verify_seconds + run.accept_seconds for run in runs)
    return _share(1e3 * busy, sum(run.tokens for run in runs))


def _rate(runs: Sequence[Run]) -> float:
    return _share(sum(run.tokens for run in runs), sum(run.seconds for run in runs))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _distinct(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))
