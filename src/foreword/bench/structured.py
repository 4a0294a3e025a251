"""What a prescribed form costs and what it brings: with and without a schema, with and without guesses, in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.drafters.overrides import SpeculationSetting
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.errors import RequestError
from foreword.structured.params import StructuredOutputs

LONG_KEYS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_reference_number": {"type": "integer", "minimum": 1, "maximum": 99999},
        "full_name_of_the_customer": {"type": "string", "maxLength": 20},
        "preferred_delivery_address": {"type": "string", "maxLength": 30},
        "is_a_registered_business_customer": {"type": "boolean"},
        "date_of_the_most_recent_order": {"type": "string", "format": "date"},
        "products_in_the_shopping_basket": {
            "type": "array",
            "items": {"enum": ["garden chair", "reading lamp", "coffee machine"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": [
        "customer_reference_number",
        "full_name_of_the_customer",
        "preferred_delivery_address",
        "is_a_registered_business_customer",
        "date_of_the_most_recent_order",
        "products_in_the_shopping_basket",
    ],
    "additionalProperties": False,
}
PROMPT = "Write the record of customer {number} of a furniture shop as JSON."


@dataclass(frozen=True)
class Way:
    """One of the ways that take turns."""

    name: str
    has_schema: bool
    speculation: SpeculationSetting


@dataclass(frozen=True)
class WayResult:
    """Medians over the rounds."""

    way: str
    tokens_per_second: float
    tokens_per_pass: float  # of one request
    step_ms: float
    beside_ms: (
        float  # of these, neither drafting nor the pass: masks, distributions, verdicts, commits, bookkeeping
    )
    ratio: float  # tokens per second over those of plain decoding with the same form, median of the rounds' ratios


@dataclass(frozen=True)
class StructuredCosts:
    """All ways at one batch size."""

    batch: int
    rows: list[WayResult]
    mask_share: float  # of a plain step: what the schema adds beside the pass


@dataclass(frozen=True)
class _Run:
    tokens: int
    passes: int  # of all requests together
    steps: int
    seconds: float
    beside_seconds: float


def ways_for(engine: EngineCore) -> list[Way]:
    """The engine's own guesses take part where it has some."""
    own = engine.drafters.default_config
    ways = [Way("no schema, plain", False, False)]
    if own is not None:
        ways.append(Way("no schema, " + "+".join(own.method), False, None))
    ways += [Way("schema, plain", True, False), Way("schema, grammar", True, {"method": "grammar", **_FIXED})]
    if own is not None:
        ways.append(Way("schema, grammar+" + "+".join(own.method), True, None))
    return ways


_FIXED = {"num_speculative_tokens": 16, "fixed": True}


def measure_structured(
    engine: EngineCore,
    encode: Callable[[str], Sequence[int]],
    batch: int,
    tokens: int,
    repeats: int,
    progress: Callable[[int, int], None],
    schema: dict[str, Any] | None = None,
) -> StructuredCosts:
    """Every way once in every round; the first round is not counted."""
    if batch < 1 or tokens < 8 or repeats < 1:
        raise RequestError("--batch and --repeats must be at least 1, --tokens at least 8")
    form = StructuredOutputs(json=LONG_KEYS if schema is None else schema)
    prompts = [tuple(encode(PROMPT.format(number=number + 1))) for number in range(batch)]
    ways = ways_for(engine)
    rounds: list[list[_Run]] = []
    for number in range(repeats + 1):
        rounds.append([_run(engine, prompts, way, form, tokens) for way in ways])
        progress(number + 1, repeats + 1)
    kept = rounds[1:]
    plain = {way.has_schema: place for place, way in enumerate(ways) if way.speculation is False}
    rows = [_row(way, place, plain[way.has_schema], kept) for place, way in enumerate(ways)]
    added = [
        (_beside(runs[plain[True]]) - _beside(runs[plain[False]])) / _step(runs[plain[False]])
        for runs in kept
    ]
    return StructuredCosts(batch, rows, median(added))


def _run(
    engine: EngineCore, prompts: Sequence[tuple[int, ...]], way: Way, form: StructuredOutputs, tokens: int
) -> _Run:
    """Decode until all have ended; only steps in which nobody reads a prompt, and all are there, are counted."""
    params = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        structured=form if way.has_schema else None,
        ignore_eos=not way.has_schema,
    )
    requests = [
        engine.add(NewRequest(f"structured-{place}", prompt, params, speculation=way.speculation))[0]
        for place, prompt in enumerate(prompts)
    ]
    try:
        while not all(request.output_ids for request in requests):
            engine.step()
        had, before, steps = sum(len(r.tokens) for r in requests), engine.seconds, engine.steps
        while all(request.finish_reason is None for request in requests):
            engine.step()
        spent = engine.seconds - before
        gained, done = sum(len(r.tokens) for r in requests) - had, engine.steps - steps
        beside = spent.total - spent.draft - spent.verify
        return _Run(gained, done * len(requests), done, spent.total, beside)
    finally:
        for request in requests:
            engine.abort(request.name)


def _beside(run: _Run) -> float:
    return run.beside_seconds / run.steps


def _step(run: _Run) -> float:
    return run.seconds / run.steps


def _row(way: Way, place: int, plain: int, rounds: Sequence[Sequence[_Run]]) -> WayResult:
    runs = [found[place] for found in rounds]
    speeds = [run.tokens / run.seconds for run in runs]
    baseline = [found[plain].tokens / found[plain].seconds for found in rounds]
    return WayResult(
        way.name,
        tokens_per_second=median(speeds),
        tokens_per_pass=median(run.tokens / run.passes for run in runs),
        step_ms=1e3 * median(map(_step, runs)),
        beside_ms=1e3 * median(map(_beside, runs)),
        ratio=median(own / base for own, base in zip(speeds, baseline, strict=True)),
    )
