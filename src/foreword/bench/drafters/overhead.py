"""What guessing costs, next to the passes that it is meant to save."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import median
from time import perf_counter

from foreword.bench.drafters.methods import Method
from foreword.bench.drafters.prompts import own_prompts
from foreword.bench.step_cost import ContextPasses
from foreword.drafters.config import SpeculationConfig
from foreword.engine.llm import LLM
from foreword.errors import RequestError
from foreword.speculation.protocols import Ask, Drafter

VERIFY_ROWS = (1, 6)
"""Rows of the passes that drafting is compared with: plain decoding, and a verify of five guesses."""

_TOKENS_PER_STEP = 2
"""Tokens that a request gains between two drafts."""


@dataclass(frozen=True)
class Overhead:
    """Median cost of one draft at one length of context."""

    drafter: str
    context: int
    first_ms: float  # the first draft, which reads the whole text; once per request
    draft_ms: float  # every later one
    verify_ms: dict[int, float]  # rows of a target pass -> its milliseconds

    def share(self, rows: int) -> float:
        """Drafting as a part of a pass over so many rows."""
        return self.draft_ms / self.verify_ms[rows]


def measure_overhead(
    llm: LLM,
    methods: Sequence[Method],
    contexts: Sequence[int],
    repeats: int,
    on_progress: Callable[[str, int, int], None],
) -> list[Overhead]:
    """Drafts and passes in turn at every context, drafters within their guards, caches cold from the pass."""
    target = llm.engine.target
    slack = _TOKENS_PER_STEP * repeats + max(VERIFY_ROWS)
    if not contexts or min(contexts) < 1 or max(contexts) + slack > target.config.context_length:
        raise RequestError(f"contexts must be in 1 .. {target.config.context_length - slack} for this model")
    if repeats < 1:
        raise RequestError(f"repeats must be at least 1, not {repeats}")
    text = _text(llm, max(contexts) + slack)
    passes = ContextPasses(target, max(contexts) + slack)
    found = []
    for place, context in enumerate(sorted(contexts)):
        on_progress(f"context {context}", place, len(contexts))
        passes.grow(text[len(passes.request.tokens) : context])
        for method in methods:
            drafter = llm.build_drafter(SpeculationConfig.parse(method.config))
            found.append(_measure_one(method, drafter, passes, text[context:], repeats))
            if getattr(drafter, "faults", None):
                raise RequestError(f"{method.label} needs more than a text and cannot be measured alone")
    return found


def _measure_one(
    method: Method, drafter: Drafter, passes: ContextPasses, continuation: Sequence[int], repeats: int
) -> Overhead:
    nodes = SpeculationConfig.parse(method.config).num_speculative_tokens
    request = replace(passes.request, tokens=list(passes.request.tokens))  # grows, the passes' own does not
    context = len(request.tokens)
    ask = Ask(request, nodes, nodes)  # type: ignore[arg-type]
    first = _timed_draft(drafter, ask)
    drafts: list[float] = []
    verifies: dict[int, list[float]] = {rows: [] for rows in VERIFY_ROWS}
    for step in range(repeats):
        for rows in VERIFY_ROWS:
            verifies[rows].append(passes.timed(rows))
        start = step * _TOKENS_PER_STEP
        request.tokens += continuation[start : start + _TOKENS_PER_STEP]
        drafts.append(_timed_draft(drafter, ask))
    medians = {rows: 1e3 * median(seconds) for rows, seconds in verifies.items()}
    return Overhead(method.label, context, 1e3 * first, 1e3 * median(drafts), medians)


def _timed_draft(drafter: Drafter, ask: Ask) -> float:
    began = perf_counter()
    drafter.propose([ask])
    return perf_counter() - began


def _text(llm: LLM, length: int) -> list[int]:
    """Our own prompts over and over, a few tokens further in every round: much matches, not all of it."""
    tokens = [token for prompt in own_prompts() for token in llm.encode(prompt.text)]
    rounds = (tokens[start:] + tokens[:start] for start in cycle(range(0, len(tokens), 97)))
    return list(islice((token for one in rounds for token in one), length))
