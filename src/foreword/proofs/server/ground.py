"""What every check is given: the server, its abilities and the plan; and what it returns: a verdict."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any

from foreword.proofs.server.client import Body, Broken, RefusedByServer, Server, ServerAnswer

FILTERS_OFF: Body = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,  # vLLM, SGLang, TGI
    "repeat_penalty": 1.0,  # llama.cpp, llama-cpp-python, Ollama
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "mirostat": 0,  # llama.cpp
    "mirostat_mode": 0,  # llama-cpp-python
}
"""Filters and penalties under their usual names, each with the value that switches it off.

Servers have some of them on by default, and ignore or refuse the names that they do not know.
"""

_LISTED = (20, 5)  # alternatives per token, most first
_ANSWERS = (16, 4, 2)  # answers per request, most first

MOST_REQUESTS = 2 + len(FILTERS_OFF) + len(_LISTED) + 2 + len(_ANSWERS)
"""Requests that probing sends at most."""

_PROBE: Body = {"prompt": "a b c", "max_tokens": 2, "temperature": 0.0}


@dataclass(frozen=True)
class Abilities:
    """Fields that a server understands."""

    filters_off: Body  # fields that switch its filters off
    logprobs: int = 0  # alternatives that it lists per token
    token_ids: bool = False  # it returns token ids, and takes them as a prompt
    n: int = 1  # answers per request


async def probe(server: Server) -> Abilities:
    """Send one optional field after the other; `Broken` or `Refused` if a request without them fails."""
    await server.ask(_PROBE)
    filters = await _filters_off(server)
    logprobs = 0
    for count in _LISTED:
        answer = await _answer(server, logprobs=count)
        if answer and answer.first.tokens and answer.first.tokens[0].top:
            logprobs = count
            break
    answer = await _answer(server, return_token_ids=True)
    has_ids = bool(answer and answer.first.token_ids and answer.prompt_ids and server.route == "completions")
    if has_ids and answer is not None:
        has_ids = await _answer(server, prompt=answer.prompt_ids) is not None
    n = 1
    for count in _ANSWERS:
        answer = await _answer(server, n=count, temperature=1.0, max_tokens=1)
        if answer and len(answer.choices) == count:
            n = count
            break
    return Abilities(filters, logprobs, has_ids, n)


async def _filters_off(server: Server) -> Body:
    """Return all filters' fields, or those that the server takes one by one where it refuses all together."""
    if await _answer(server, **FILTERS_OFF):
        return FILTERS_OFF
    return {name: off for name, off in FILTERS_OFF.items() if await _answer(server, **{name: off})}


async def _answer(server: Server, **fields: Any) -> ServerAnswer | None:  # noqa: ANN401 - any JSON
    """Return the answer to a request with these fields; None where the server refuses it or fails."""
    try:
        return await server.ask({**_PROBE, **fields})
    except (Broken, RefusedByServer):
        return None


# Texts that repeat themselves, which lookups draft well, and others.
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
class ExaminationPlan:
    """The size of an examination."""

    name: str
    prompts: int  # texts that are tried for what must be equal
    tokens: int  # of their answers
    at_once: int  # requests in flight together
    draws: int  # sampled answers for the law
    depth: int  # tokens of each of them

    @property
    def texts(self) -> Sequence[str]:
        return tuple(islice(PROMPTS, self.prompts))


LEAST_TOKENS = 128
"""Of every text that is compared: speculation that changes texts may do so only after dozens of tokens."""

SMALL = ExaminationPlan("small", prompts=3, tokens=LEAST_TOKENS, at_once=4, draws=256, depth=4)
STANDARD = ExaminationPlan("standard", prompts=8, tokens=LEAST_TOKENS, at_once=8, draws=4_000, depth=8)
FULL = ExaminationPlan("full", prompts=12, tokens=2 * LEAST_TOKENS, at_once=16, draws=40_000, depth=8)


@dataclass
class Extent:
    """Prompts of a check and the lengths of the answers that it judged."""

    prompts: set[str] = field(default_factory=set)
    most: int = 0  # tokens of the longest answer
    fewest: int | None = None  # tokens of the shortest one; None where the server counts none
    limit: int = 0  # the largest max_tokens

    def add(self, prompt: str, answers: Sequence[ServerAnswer]) -> None:
        """Count the answers of one case."""
        self.prompts.add(prompt)
        for answer in answers:
            self.limit = max(self.limit, answer.body["max_tokens"])
            for length in answer.lengths:
                self.most = max(self.most, length)
                self.fewest = length if self.fewest is None else min(self.fewest, length)

    @property
    def tokens(self) -> int:
        """Tokens of the longest answer; the limit where the server counts none."""
        return self.limit if self.fewest is None else self.most

    def __str__(self) -> str:
        if not self.prompts:
            return ""
        if self.fewest is None:
            return f"{len(self.prompts)} × ≤{self.limit}"
        lengths = f"{self.most}" if self.fewest == self.most else f"{self.fewest}–{self.most}"
        return f"{len(self.prompts)} × {lengths}"


CONFIDENCE = 0.95
"""Probability with which a fault of the stated size would have been seen."""


class ClaimStatus(StrEnum):
    """How a claim stands after its check."""

    HELD = "held"  # in every case that was tried; says nothing of other prompts or longer texts
    DIFFERS_AT_TIES = "differs at near-ties"  # greedy texts part, but only where rounding may decide
    NOT_REFUTED = "not refuted"  # a statistical test with a stated power
    REFUTED = "refuted"
    FAILS_TOGETHER = "fails under concurrency"  # requests fail beside others that succeed alone
    NOT_TRIED = "not tried"  # the server has not got what it takes, or it rests on a claim that was refuted


@dataclass(frozen=True)
class Reproduction:
    """The smallest request that shows the fault, what came of it and what should have."""

    bodies: Sequence[Mapping[str, Any]]  # sent in this order, or at once if `at_once`
    got: str
    expected: str
    at_once: bool = False


@dataclass(frozen=True)
class ClaimVerdict:
    """One line of the report."""

    outcome: ClaimStatus
    tried: int = 0  # cases: requests compared, tokens drawn
    detail: str = ""
    visible: str = ""  # the fault that would have been seen
    reproduction: Reproduction | None = None
    extent: Extent = field(default_factory=Extent)
    check: str = ""  # the claim's name

    @property
    def words(self) -> str:
        """The verdict as people read it, with its number of cases."""
        has_cases = self.outcome in (ClaimStatus.HELD, ClaimStatus.NOT_REFUTED)
        return f"{self.outcome.value} in {self.tried:,}" if has_cases else self.outcome.value


def held(tried: int, detail: str = "") -> ClaimVerdict:
    """Return the verdict of a claim that held in every case; not tried if there was none."""
    if not tried:
        return not_tried(detail or "no request showed it")
    share = 1 - (1 - CONFIDENCE) ** (1 / tried)
    visible = f"a fault in {share:.1%} of requests like these ({CONFIDENCE:.0%})"
    return ClaimVerdict(ClaimStatus.HELD, tried, detail, visible)


def not_tried(why: str) -> ClaimVerdict:
    return ClaimVerdict(ClaimStatus.NOT_TRIED, detail=why)


def refuted(tried: int, detail: str, reproduction: Reproduction) -> ClaimVerdict:
    return ClaimVerdict(ClaimStatus.REFUTED, tried, detail, reproduction=reproduction)


@dataclass(frozen=True)
class Ground:
    """The server, its fields and how much to ask."""

    server: Server
    plan: ExaminationPlan
    abilities: Abilities
    plain: Server | None = None  # the same model without speculation: another server, or a field of this one
    tolerance: float = 0.05  # nats between two computations of one log probability that rounding may explain
    seed: int = 0  # the first of the seeds that are sent
    on_judged: Callable[[], None] = field(default=lambda: None)  # called after every case
    extent: Extent = field(default_factory=Extent)  # of the check that is running

    def judged(self, prompt: str, *answers: ServerAnswer) -> None:
        """Count the answers of one case, and report progress."""
        self.extent.add(prompt, answers)
        self.on_judged()

    def greedy(self, prompt: str, **fields: object) -> Body:
        """Return a request for the most likely text, without filters: a penalty changes greedy texts too."""
        body: Body = {"prompt": prompt, "max_tokens": self.plan.tokens, "temperature": 0.0}
        return self.with_logprobs({**body, **self.abilities.filters_off, **fields})

    def sampled(self, prompt: str, seed: int, **fields: object) -> Body:
        """Return a request for a text drawn from the model's own distribution, without filters."""
        body: Body = {"prompt": prompt, "max_tokens": self.plan.tokens, "temperature": 1.0}
        return {**body, "seed": self.seed + seed, **self.abilities.filters_off, **fields}

    def with_logprobs(self, body: Body) -> Body:
        """As many alternatives as the server lists."""
        return {**body, "logprobs": self.abilities.logprobs} if self.abilities.logprobs else body


@dataclass(frozen=True)
class Need:
    """What a check takes."""

    is_met: Callable[[Ground], bool]
    without: str  # why the check is not tried without it


LOGPROBS = Need(lambda ground: bool(ground.abilities.logprobs), "the server lists no log probabilities")
PLAIN = Need(
    lambda ground: ground.plain is not None,
    "needs --plain-url, or --plain-body with what turns speculation off",
)

Examine = Callable[[Ground], Awaitable[ClaimVerdict]]


@dataclass(frozen=True)
class Check:
    """A claim that a server makes to its users, and how it is examined."""

    name: str
    claim: str  # a sentence
    requests: Callable[
        [Ground], int
    ]  # at most; a few more where it is refuted, to find a small one that shows it
    verdict: Examine  # asks and judges; `RefusedByServer`: the server has not got what it takes
    rests_on: tuple[str, ...]  # names of claims without which its outcome would say nothing
    needs: Need | None

    def cost(self, ground: Ground) -> int:
        """Requests at most, unless the claim is refuted."""
        return self.requests(ground) if self._can_try(ground) else 0

    async def examine(self, ground: Ground) -> ClaimVerdict:
        if self.needs is not None and not self._can_try(ground):
            return not_tried(self.needs.without)
        return await self.verdict(ground)

    def _can_try(self, ground: Ground) -> bool:
        return self.needs is None or self.needs.is_met(ground)


def check(
    name: str,
    claim: str,
    requests: Callable[[Ground], int],
    rests_on: tuple[str, ...] = (),
    needs: Need | None = None,
) -> Callable[[Examine], Check]:
    """Make a check of a function that asks and judges."""
    return lambda verdict: Check(name, claim, requests, verdict, rests_on, needs)
