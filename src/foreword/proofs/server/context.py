"""Inputs of all checks (server, abilities, plan), and their verdicts."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
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
"""Filters and penalties by their names in various servers, with the value that disables each.

Servers enable some by default. They ignore or refuse unknown names.
"""

_LISTED = (20, 5)  # numbers of alternatives per token to try
_ANSWERS = (16, 4, 2)  # numbers of answers per request to try

_PLAIN_REQUESTS, _ID_REQUESTS = 1, 2
MOST_REQUESTS = _PLAIN_REQUESTS + 1 + len(FILTERS_OFF) + len(_LISTED) + _ID_REQUESTS + len(_ANSWERS)
"""Maximum number of requests of `probe`; the filters are tried together, and then possibly one by one."""

_PROBE: Body = {"prompt": "a b c", "max_tokens": 2, "temperature": 0.0}


@dataclass(frozen=True)
class Abilities:
    """Optional fields that a server supports."""

    filters_off: Body  # fields that disable its filters
    logprobs: int = 0  # alternatives listed per token
    token_ids: bool = False  # whether it returns token ids and accepts them as a prompt
    n: int = 1  # maximum answers per request


async def probe(server: Server) -> Abilities:
    """Try optional fields one by one; raise `Broken` or `RefusedByServer` if a plain request fails."""
    await server.ask(_PROBE)
    filters = await _filters_off(server)
    logprobs = 0
    for count in _LISTED:
        answer = await _answer(server, logprobs=count)
        if answer and answer.first.tokens and answer.first.tokens[0].top:
            logprobs = count
            break
    has_ids = False
    answer = await _answer(server, return_token_ids=True)
    if answer and answer.first.token_ids and answer.prompt_ids and server.route == "completions":
        has_ids = await _answer(server, prompt=answer.prompt_ids) is not None
    n = 1
    for count in _ANSWERS:
        answer = await _answer(server, n=count, temperature=1.0, max_tokens=1)
        if answer and len(answer.choices) == count:
            n = count
            break
    return Abilities(filters, logprobs, has_ids, n)


async def _filters_off(server: Server) -> Body:
    """Return all filter fields, or those accepted one by one if all together are refused."""
    if await _answer(server, **FILTERS_OFF):
        return FILTERS_OFF
    return {name: off for name, off in FILTERS_OFF.items() if await _answer(server, **{name: off})}


async def _answer(server: Server, **fields: Any) -> ServerAnswer | None:  # noqa: ANN401 - any JSON
    """Return the answer to a request with these fields; None if refused or failed."""
    try:
        return await server.ask({**_PROBE, **fields})
    except (Broken, RefusedByServer):
        return None


# Some of the texts are repetitive: lookups draft these well.
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
    """Size of an examination."""

    name: str
    prompts: int  # number of prompts whose texts are compared
    tokens: int  # tokens per answer
    at_once: int  # concurrent requests
    draws: int  # sampled answers of the statistical checks
    depth: int  # tokens per sampled answer

    @property
    def texts(self) -> Sequence[str]:
        return PROMPTS[: self.prompts]


LEAST_TOKENS = 128
"""Minimum length of compared texts except in `BRIEF`, since differences may appear after dozens of tokens only."""

# `BRIEF` takes minutes on a server of ten tokens per second. Its short texts detect less.
BRIEF = ExaminationPlan("brief", prompts=2, tokens=32, at_once=4, draws=32, depth=3)
SMALL = ExaminationPlan("small", prompts=3, tokens=LEAST_TOKENS, at_once=4, draws=256, depth=4)
STANDARD = ExaminationPlan("standard", prompts=8, tokens=LEAST_TOKENS, at_once=8, draws=4_000, depth=8)
FULL = ExaminationPlan("full", prompts=12, tokens=2 * LEAST_TOKENS, at_once=16, draws=40_000, depth=8)


@dataclass
class Extent:
    """Which prompts a check compared, and how long the answers were."""

    prompts: set[str] = field(default_factory=set)
    lengths: list[int] = field(default_factory=list)  # tokens of all answers that report them
    limit: int = 0  # the largest max_tokens

    def add(self, prompt: str, answers: Sequence[ServerAnswer]) -> None:
        """Count the answers of one case."""
        self.prompts.add(prompt)
        for answer in answers:
            self.limit = max(self.limit, answer.body["max_tokens"])
            self.lengths += answer.lengths

    @property
    def fewest(self) -> int | None:
        """Length of the shortest answer; None if the server reports no counts."""
        return min(self.lengths, default=None)

    @property
    def tokens(self) -> int:
        """Length of the longest answer; the limit if unknown."""
        return max(self.lengths, default=self.limit)

    def __str__(self) -> str:
        if not self.prompts:
            return ""
        if self.fewest is None:
            return f"{len(self.prompts)} × ≤{self.limit}"
        lengths = f"{self.tokens}" if self.fewest == self.tokens else f"{self.fewest}–{self.tokens}"
        return f"{len(self.prompts)} × {lengths}"


CONFIDENCE = 0.95  # probability of detecting a fault of the reported size


class ClaimStatus(StrEnum):
    """Result of a claim's check."""

    HELD = "held"  # in every case tried
    DIFFERS_AT_TIES = "differs at near-ties"  # greedy texts differ only where rounding may decide
    NOT_REFUTED = "not refuted"  # a statistical test of known power found no fault
    REFUTED = "refuted"
    FAILS_TOGETHER = "fails under concurrency"  # requests fail next to others and succeed alone
    NOT_TRIED = "not tried"  # missing ability, or dependence on a refuted claim


@dataclass(frozen=True)
class Reproduction:
    """The smallest requests that show a fault, with actual and expected result."""

    bodies: Sequence[Mapping[str, Any]]
    got: str
    expected: str
    at_once: bool = False  # send the requests concurrently instead of in order


@dataclass(frozen=True)
class ClaimVerdict:
    """Verdict on one claim: a line of the report."""

    outcome: ClaimStatus
    tried: int = 0  # number of compared requests or sampled tokens
    detail: str = ""
    visible: str = ""  # smallest fault that would have been detected
    reproduction: Reproduction | None = None
    extent: Extent = field(default_factory=Extent)
    check: str = ""  # the claim's name

    @property
    def words(self) -> str:
        """Verdict with its number of cases, for people."""
        has_cases = self.outcome in (ClaimStatus.HELD, ClaimStatus.NOT_REFUTED)
        return f"{self.outcome.value} in {self.tried:,}" if has_cases else self.outcome.value


def held(tried: int, detail: str = "") -> ClaimVerdict:
    """Return the verdict of a claim that held in every case; without cases, it was not tried."""
    if not tried:
        return not_tried(detail or "no request showed it")
    # If this fraction of requests had a fault, `tried` requests would miss it with the probability 1 - CONFIDENCE.
    share = 1 - (1 - CONFIDENCE) ** (1 / tried)
    visible = f"a fault in {share:.1%} of requests like these ({CONFIDENCE:.0%})"
    return ClaimVerdict(ClaimStatus.HELD, tried, detail, visible)


class NotTried(Exception):  # noqa: N818 - named after the verdict
    """A claim cannot be examined on this server."""


def not_tried(why: str) -> ClaimVerdict:
    return ClaimVerdict(ClaimStatus.NOT_TRIED, detail=why)


def refuted(tried: int, detail: str, reproduction: Reproduction) -> ClaimVerdict:
    return ClaimVerdict(ClaimStatus.REFUTED, tried, detail, reproduction=reproduction)


@dataclass(frozen=True)
class ProofContext:
    """The server, its abilities and the size of the examination."""

    server: Server
    plan: ExaminationPlan
    abilities: Abilities
    plain: Server | None = None  # the same model without speculation: another server, or another field
    tolerance: float = 0.05  # nats that rounding may explain
    seed: int = 0  # first seed
    on_judged: Callable[[], None] = field(default=lambda: None)  # called after every case
    extent: Extent = field(default_factory=Extent)  # of the running check

    def judged(self, prompt: str, *answers: ServerAnswer) -> None:
        """Count the answers of one case, and report progress."""
        self.extent.add(prompt, answers)
        self.on_judged()

    def greedy(self, prompt: str, **fields: object) -> Body:
        """Return a greedy request without filters, since penalties change greedy texts too."""
        body: Body = {"prompt": prompt, "max_tokens": self.plan.tokens, "temperature": 0.0}
        return self.with_logprobs({**body, **self.abilities.filters_off, **fields})

    def sampled(self, prompt: str, seed: int, **fields: object) -> Body:
        """Return a request for a sample from the model's distribution, without filters."""
        body: Body = {"prompt": prompt, "max_tokens": self.plan.tokens, "temperature": 1.0}
        return {**body, "seed": self.seed + seed, **self.abilities.filters_off, **fields}

    def with_logprobs(self, body: Body) -> Body:
        """Request as many alternatives as the server lists."""
        return {**body, "logprobs": self.abilities.logprobs} if self.abilities.logprobs else body


def without_logprobs(context: ProofContext) -> str:
    """Return why checks of log-probabilities are skipped; empty: they are not."""
    return "" if context.abilities.logprobs else "the server lists no log probabilities"


def without_plain(context: ProofContext) -> str:
    """Return why comparisons with plain decoding are skipped; empty: they are not."""
    return "" if context.plain else "needs --plain-url, or --plain-body with what turns speculation off"


Examine = Callable[[ProofContext], Awaitable[ClaimVerdict]]


@dataclass(frozen=True)
class Check:
    """A claim about a server, and its examination."""

    name: str
    claim: str  # a sentence
    # Maximum number of requests. A refuted claim takes some more, which shorten the reproduction.
    requests: Callable[[ProofContext], int]
    verdict: Examine  # raises `NotTried` or `RefusedByServer` for a missing ability
    rests_on: tuple[str, ...] = ()  # claims that must hold for a meaningful result
    skipped: Callable[[ProofContext], str] = lambda _: ""  # why; empty: it is not

    def cost(self, context: ProofContext) -> int:
        """Return the maximum number of requests, unless the claim is refuted."""
        return 0 if self.skipped(context) else self.requests(context)

    async def examine(self, context: ProofContext) -> ClaimVerdict:
        why = self.skipped(context)
        return not_tried(why) if why else await self.verdict(context)
