"""`foreword bench accept`: the cost of the acceptance rule."""

from dataclasses import asdict
from typing import Annotated

import typer

from foreword.cli.console import (
    DEFAULT_MODEL,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    load_llm,
    parse_sizes,
    print_json,
    progress_bar,
    stdout,
)

SAMPLE_TEXT = (
    "The light of the sun looks white, but it is made of all the colours of the rainbow. When it meets the air, "
    "the short blue waves are scattered in all directions far more than the long red ones. So wherever we look up "
    "during the day, some of that scattered blue light reaches our eyes, and the sky seems blue. In the evening "
    "the light has a much longer way through the air, most of the blue is lost on it, and what is left is red."
)
"""A text for measurements on real logits."""


def accept(
    model: ModelOption = DEFAULT_MODEL,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(help="Nucleus sampling: probability mass of the tokens kept, such as 0.9.")
    ] = 0.9,
    rule: Annotated[
        str, typer.Option(help="Acceptance rule: coupled, token, block or traversal.")
    ] = "coupled",
    chain: Annotated[int, typer.Option(help="Draft tokens of each request.")] = 5,
    requests: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,4,16",
    repeats: Annotated[int, typer.Option(help="Timed rounds; the median is reported.")] = 15,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure the time of accepting or rejecting drafts, and its ratio to the target pass that verifies them."""
    from foreword.acceptance.params import SamplingParams
    from foreword.acceptance.rules.rule import Rule

    params, judged_by = SamplingParams(temperature=temperature, top_p=top_p), Rule.parse(rule)
    sizes = parse_sizes("--requests", requests)
    from foreword.bench.pass_costs import measure_accept_cost
    from foreword.bench.skeleton import table

    llm = load_llm(model, dtype, device, backend)
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
    title = (
        f"acceptance of chains of {chain}; one pass over {chain + 1} tokens takes {costs.verify_ms:.2f} ms"
    )
    columns = {"requests": "{.requests}", "ms": "{.ms:.2f}", "ms per request": "{.ms_per_request:.2f}"}
    stdout.print(table(costs.rows, columns | {"ratio to the pass": "{.ratio:.3f}"}, title))
    if as_json:
        rows = [asdict(cost) for cost in costs.rows]
        print_json({"model": model, "rule": rule, "verify_ms": costs.verify_ms, "rows": rows})
