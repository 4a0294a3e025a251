"""`foreword bench`: measure it."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from foreword.cli.console import (
    DEFAULT_MODEL,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    load_llm,
    print_json,
    progress_bar,
    stdout,
)
from foreword.errors import RequestError

SAMPLE_TEXT = (
    "The light of the sun looks white, but it is made of all the colours of the rainbow. When it meets the air, "
    "the short blue waves are scattered in all directions far more than the long red ones. So wherever we look up "
    "during the day, some of that scattered blue light reaches our eyes, and the sky seems blue. In the evening "
    "the light has a much longer way through the air, most of the blue is lost on it, and what is left is red."
)
"""A text for measurements on real logits."""

app = typer.Typer(no_args_is_help=True, help="Measure costs and speed, always as ratios within one run.")


@app.callback()
def _group() -> None:
    """Measure costs and speed, always as ratios within one run."""


@app.command("step")
def step(
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[str, typer.Option(help="Numbers of new tokens, separated by commas.")] = "1,2,4,8,16",
    context: Annotated[int, typer.Option(help="Committed tokens before the new ones.")] = 256,
    repeats: Annotated[int, typer.Option(help="Timed passes for each number; the median counts.")] = 15,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Milliseconds of one target pass over n new tokens, and the ratio to the first n.

    Verifying a guess of n-1 tokens costs a pass over n: the flatter this curve, the more speculation pays.
    """
    from foreword.bench.step_cost import measure_step_cost

    sizes = _parse_sizes("--tokens", tokens)
    llm = load_llm(model, dtype, device)
    with progress_bar("measuring") as on_progress:
        costs = measure_step_cost(
            llm.engine.target, sizes, context=context, repeats=repeats, progress=on_progress
        )
    table = Table("n", "ms", "ratio", title=f"one pass over n new tokens, context {context}")
    for cost in costs:
        table.add_row(str(cost.n), f"{cost.ms:.2f}", f"{cost.ratio:.2f}")
    stdout.print(table)
    if as_json:
        print_json({"model": model, "context": context, "rows": [asdict(cost) for cost in costs]})


@app.command("accept")
def accept(
    model: ModelOption = DEFAULT_MODEL,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Nucleus.")] = 0.9,
    rule: Annotated[str, typer.Option(help="coupled, token or block.")] = "coupled",
    chain: Annotated[int, typer.Option(help="Guessed tokens of each request.")] = 5,
    requests: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,4,16",
    repeats: Annotated[int, typer.Option(help="Timed rounds; the median counts.")] = 15,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Milliseconds of judging drafts, and the ratio to the target pass that verified them."""
    from foreword.acceptance.params import SamplingParams
    from foreword.acceptance.rules import Rule
    from foreword.bench.accept_cost import measure_accept_cost

    params, judged_by = SamplingParams(temperature=temperature, top_p=top_p), Rule.parse(rule)
    sizes = _parse_sizes("--requests", requests)
    llm = load_llm(model, dtype, device)
    with progress_bar("measuring") as on_progress:
        costs = measure_accept_cost(
            llm.engine.target,
            llm.tokenizer.encode(SAMPLE_TEXT),
            params,
            chain=chain,
            rule=judged_by,
            batches=sizes,
            repeats=repeats,
            progress=on_progress,
        )
    title = f"judging chains of {chain}; one pass over {chain + 1} rows takes {costs.verify_ms:.2f} ms"
    table = Table("requests", "ms", "ms per request", "ratio to the pass", title=title)
    for cost in costs.rows:
        table.add_row(str(cost.requests), f"{cost.ms:.2f}", f"{cost.ms_per_request:.2f}", f"{cost.ratio:.3f}")
    stdout.print(table)
    if as_json:
        rows = [asdict(cost) for cost in costs.rows]
        print_json({"model": model, "rule": rule, "verify_ms": costs.verify_ms, "rows": rows})


def _parse_sizes(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(f"{option} takes numbers separated by commas, not {text!r}") from error
