"""Measures structured output: with and without a schema and speculation, interleaved."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from statistics import median
from typing import Annotated, Any

from foreword.acceptance.params import SamplingParams
from foreword.bench.batch_runs import BatchRun, full_batch, measured
from foreword.bench.skeleton import InTable, median_ratio, take_turns
from foreword.drafters.config import SpeculationSetting
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.errors import RequestError
from foreword.progress import Progress
from foreword.structured.params import StructuredOutputs

CUSTOMER_SCHEMA: dict[str, Any] = json.loads(
    (files("foreword.bench") / "data" / "customer_record.schema.json").read_text(encoding="utf-8")
)
"""The default schema: a customer record with long keys, which the drafter `grammar` can draft."""

PROMPT = "Write the record of customer {number} of a furniture shop as JSON."

_GRAMMAR = {"method": "grammar", "num_speculative_tokens": 16, "fixed": True}


@dataclass(frozen=True)
class StructuredArm:
    """A measured variant: with or without the schema, and with a setting of speculation."""

    name: str
    has_schema: bool
    speculation: SpeculationSetting


@dataclass(frozen=True)
class StructuredRow:
    """Medians of one arm over the rounds."""

    way: Annotated[str, InTable("")]  # name of the arm
    tokens_per_second: Annotated[float, InTable("tokens/s", ".1f")]
    tokens_per_pass: Annotated[float, InTable("tokens per pass", ".2f")]  # per request
    step_ms: Annotated[float, InTable("step ms", ".2f")]
    # Masks, acceptance and bookkeeping, without drafting.
    beside_ms: Annotated[float, InTable("outside the pass ms", ".2f")]
    # Of tokens per second to the plain arm, both with the schema or both without it.
    ratio: Annotated[float, InTable("ratio to plain", ".2f")]


def structured_arms(engine: EngineCore) -> list[StructuredArm]:
    """Return the arms to compare; those with the engine's default drafter only if it has one."""
    default = engine.drafters.default_config
    drafter = "" if default is None else "+".join(default.method)
    arms = [
        StructuredArm("no schema, plain", False, False),
        StructuredArm(f"no schema, {drafter}", False, None),
        StructuredArm("schema, plain", True, False),
        StructuredArm("schema, grammar", True, _GRAMMAR),
        StructuredArm(f"schema, grammar+{drafter}", True, None),
    ]
    return [arm for arm in arms if default is not None or arm.speculation is not None]


def measure_structured(
    engine: EngineCore,
    encode: Callable[[str], Sequence[int]],
    batch: int,
    tokens: int,
    repeats: int,
    progress: Progress,
    schema: dict[str, Any] | None = None,
) -> tuple[list[StructuredRow], float]:
    """Return the results of every arm, and the time that the schema adds to a plain step, as a fraction of the step."""
    if batch < 1 or tokens < 8 or repeats < 1:
        raise RequestError("--batch and --repeats must be at least 1, --tokens at least 8")
    structured = StructuredOutputs(json=CUSTOMER_SCHEMA if schema is None else schema)
    prompts = [tuple(encode(PROMPT.format(number=number + 1))) for number in range(batch)]
    run, arms = partial(_run, engine, prompts, tokens, structured), structured_arms(engine)
    runs = take_turns({arm.name: partial(run, arm) for arm in arms}, repeats, progress)
    plain = {arm.has_schema: runs[arm.name] for arm in arms if arm.speculation is False}  # by `has_schema`
    added = [
        (_other_ms(with_schema) - _other_ms(without)) / _step_ms(without)
        for with_schema, without in zip(plain[True], plain[False], strict=True)
    ]
    return [_row(arm.name, runs[arm.name], plain[arm.has_schema]) for arm in arms], median(added)


def _run(
    engine: EngineCore,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    structured: StructuredOutputs,
    arm: StructuredArm,
    _: int,
) -> BatchRun:
    """Decode until the first answer ends; steps that read prompts are not measured."""
    params = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        structured=structured if arm.has_schema else None,
        ignore_eos=not arm.has_schema,
    )
    wanted = [
        NewRequest(f"structured-{index}", prompt, params, speculation=arm.speculation)
        for index, prompt in enumerate(prompts)
    ]
    with full_batch(engine, wanted, engine.step) as requests:

        def advance() -> None:
            while all(request.finish_reason is None for request in requests):
                engine.step()

        run = measured(engine, requests, advance)
    if not run.steps:
        raise RequestError(
            f"--tokens {tokens}: an answer ended before all prompts were read; "
            "give more tokens or a smaller --batch"
        )
    return run


def _step_ms(run: BatchRun) -> float:
    return 1e3 * run.spent.total / run.steps


def _other_ms(run: BatchRun) -> float:
    """Return the time of a step outside drafting and the pass."""
    return 1e3 * (run.spent.total - run.spent.draft - run.spent.verify) / run.steps


def _row(name: str, runs: Sequence[BatchRun], plain: Sequence[BatchRun]) -> StructuredRow:
    """Return the medians of an arm; `plain` are the runs of the same rounds without speculation."""
    speeds = [run.tokens / run.spent.total for run in runs]
    plain_speeds = [run.tokens / run.spent.total for run in plain]
    return StructuredRow(
        name,
        tokens_per_second=median(speeds),
        tokens_per_pass=median(run.tokens_per_pass for run in runs),
        step_ms=median(map(_step_ms, runs)),
        beside_ms=median(map(_other_ms, runs)),
        ratio=median_ratio(speeds, plain_speeds),
    )
