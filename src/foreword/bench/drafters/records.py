"""What is kept of a measurement."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from foreword.bench.drafters.decode import Run


@dataclass(frozen=True)
class Record:
    """One drafter on one prompt, and plain decoding of the same prompt beside it in the same run."""

    drafter: str  # label of the method
    prompt: str  # key of the prompt
    category: str
    speculative: Run
    plain: Run

    @property
    def identical(self) -> bool:
        """Whether guessing left the text as it was."""
        return self.speculative.token_ids == self.plain.token_ids

    @property
    def speedup(self) -> float:
        """Tokens per second, relative to plain decoding."""
        plain, own = self.plain, self.speculative
        return (
            own.tokens * plain.seconds / (own.seconds * plain.tokens) if own.seconds and plain.tokens else 1.0
        )

    def as_json(self) -> dict[str, Any]:
        """For a line of a file."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Record":
        """Read `as_json` back; ValueError if it is not one."""
        try:
            runs = {name: _run(value[name]) for name in ("speculative", "plain")}
            return Record(str(value["drafter"]), str(value["prompt"]), str(value["category"]), **runs)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a measurement: {error}") from None


def cpu_speedup(records: Sequence[Record]) -> float | None:
    """Tokens per second of the processor's time, which other programs do not lengthen, relative to plain decoding.

    None: for some of them it did not do the work. Answers that ended with their first token took no time.
    """
    decoded = [record for record in records if record.plain.tokens and record.speculative.tokens]
    guessing, plain = [record.speculative for record in decoded], [record.plain for record in decoded]
    if not decoded or not all(run.cpu_seconds for run in (*guessing, *plain)):
        return None
    rates = [
        sum(run.tokens for run in runs) / sum(run.cpu_seconds for run in runs) for runs in (guessing, plain)
    ]
    return rates[0] / rates[1]


def _run(value: Mapping[str, Any]) -> Run:
    # Files of earlier versions have no positions.
    known = {
        f.name: value[f.name] if f.default is MISSING else value.get(f.name, f.default) for f in fields(Run)
    }
    fitting: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in known.items()}
    return Run(**fitting)
