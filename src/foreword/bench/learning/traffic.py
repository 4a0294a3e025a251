"""ShiftedTraffic whose subject shifts: prompts from templates, the same for the same seed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from foreword.errors import RequestError

GENERAL = "general"  # kind of the prompts before the shift

_TOPICS = (
    *("photosynthesis", "black holes", "the French Revolution", "vaccines", "inflation", "plate tectonics"),
    *("the Silk Road", "jazz", "neural networks", "the water cycle", "democracy", "volcanoes", "coral reefs"),
    *(
        "the printing press",
        "gravity",
        "sourdough bread",
        "chess",
        "the Roman Empire",
        "solar panels",
        "tides",
    ),
)
_QUESTIONS = (
    "What is {topic}? Answer in {count} sentences.",
    "Explain {topic} to a child of {count} years.",
    "List {count} surprising facts about {topic}.",
    "Why does {topic} matter? Give {count} reasons.",
    "Write a story of {count} paragraphs in which {topic} plays a role.",
)
_TABLES = {
    "orders": ("customer_id", "order_date", "total", "status"),
    "employees": ("department", "salary", "hire_date", "manager_id"),
    "sensors": ("station", "measured_at", "temperature", "humidity"),
    "invoices": ("supplier", "due_date", "amount", "paid"),
}
_QUERIES = (
    "Write an SQL query on the table {table} ({columns}) that returns the {count} rows with the highest {column}.",
    "Write an SQL query on the table {table} ({columns}) that counts the rows per {column} and keeps groups of "
    "more than {count}.",
    "Write an SQL query on the table {table} ({columns}) that updates {column} where the id is {count}.",
)
_EVENTS = (
    "has been shipped and arrives in {days} days",
    "is delayed by {days} days",
    "was returned, and that the refund takes {days} days",
    "needs a signature within {days} days",
)
_GERMAN = (
    "Erkläre auf Deutsch in {count} Sätzen, was {topic} bedeutet.",
    "Nenne auf Deutsch {count} Tatsachen über {topic}.",
    "Schreibe auf Deutsch einen Absatz von {count} Sätzen über {topic}.",
)


def _general(dice: Random) -> str:
    return dice.choice(_QUESTIONS).format(topic=dice.choice(_TOPICS), count=dice.randint(3, 40))


def _sql(dice: Random) -> str:
    table, columns = dice.choice(list(_TABLES.items()))
    values = {"table": table, "columns": ", ".join(columns), "column": dice.choice(columns)}
    return dice.choice(_QUERIES).format(**values, count=dice.randint(3, 400))


def _mail(dice: Random) -> str:
    event = dice.choice(_EVENTS).format(days=dice.randint(2, 30))
    return (
        f"Write the e-mail of the furniture shop Oakfield that tells customer {dice.randint(1000, 9999)} that "
        f"order {dice.randint(10_000, 99_999)} {event}."
    )


def _german(dice: Random) -> str:
    return dice.choice(_GERMAN).format(topic=dice.choice(_TOPICS), count=dice.randint(3, 40))


_WRITERS: Mapping[str, Callable[[Random], str]] = {
    GENERAL: _general,
    "sql": _sql,
    "mail": _mail,
    "german": _german,
}
SHIFTS = tuple(kind for kind in _WRITERS if kind != GENERAL)  # kinds of the prompts after the shift


def write_prompts(kind: str, count: int, seed: int) -> list[str]:
    """Return different prompts of one kind; those of a larger count begin with those of a smaller one."""
    dice, found = Random(f"{seed} {kind}"), dict[str, None]()
    attempts = 100 * count
    while len(found) < count and attempts:
        found[_WRITERS[kind](dice)] = None
        attempts -= 1
    if len(found) < count:
        raise RequestError(f"the templates of {kind!r} have fewer than {count} prompts; lower --requests")
    return list(found)


@dataclass(frozen=True)
class ShiftedTraffic:
    """Prompts before and after a shift, and prompts of both kinds that are measured and never sent as traffic."""

    before: list[str]
    after: list[str]
    held_out: dict[str, list[str]]  # by kind

    @staticmethod
    def of(shift: str, before: int, after: int, held_out: int, seed: int) -> "ShiftedTraffic":
        if shift not in SHIFTS:
            raise RequestError(f"--shift must be one of {', '.join(SHIFTS)}, not {shift!r}")
        written = {
            kind: write_prompts(kind, held_out + count, seed)
            for kind, count in ((GENERAL, before), (shift, after))
        }
        return ShiftedTraffic(
            written[GENERAL][held_out:],
            written[shift][held_out:],
            {kind: prompts[:held_out] for kind, prompts in written.items()},
        )
