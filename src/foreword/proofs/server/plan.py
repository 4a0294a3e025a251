"""How much is asked: prompts, lengths, draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

# Texts that repeat themselves, which lookups guess well, and such as they guess badly.
PROMPTS = (
    "one two three one two three one two three one two",
    "The capital of France is",
    "def add(first, second):\n    return first + second\n\ndef multiply(first, second):\n    return",
    "She sells sea shells by the sea shore; the shells she sells are",
    "Once upon a time there was a",
    "name,age\nAnna,31\nBen,45\nCleo,27\nDan,",
    "To be, or not to be, that is the question: whether",
    "The sky is blue because",
    "1, 2, 4, 8, 16, 32, 64,",
    '{"items": [{"id": 1, "ok": true}, {"id": 2, "ok": true}, {"id": 3,',
    "Dear Sir or Madam,\n\nI am writing to you because",
    "SELECT name, age FROM people WHERE age > 30 AND name",
)


@dataclass(frozen=True)
class Plan:
    """The size of an examination."""

    name: str
    prompts: int  # texts that are tried for what must be equal
    tokens: int  # of their answers
    at_once: int  # requests under way together
    draws: int  # sampled answers for the law
    depth: int  # tokens of each of them

    @property
    def texts(self) -> Sequence[str]:
        return tuple(islice(PROMPTS, self.prompts))


LEAST_TOKENS = 128
"""Of every text that is compared: speculation that changes texts may do so only after dozens of tokens."""

SMALL = Plan("small", prompts=3, tokens=LEAST_TOKENS, at_once=4, draws=256, depth=4)
STANDARD = Plan("standard", prompts=8, tokens=LEAST_TOKENS, at_once=8, draws=4_000, depth=8)
FULL = Plan("full", prompts=12, tokens=2 * LEAST_TOKENS, at_once=16, draws=40_000, depth=8)
