"""`foreword bench pools`: drafting beside the target and on nodes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
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
    stage_bar,
    stdout,
)
from foreword.errors import RequestError


def pools(
    model: ModelOption = DEFAULT_MODEL,
    draft: Annotated[str | None, typer.Option(help="Draft model.")] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead of both, use a pair with random weights of this shape, such as llama-8b.",
        ),
    ] = None,
    draft_shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Shape of the draft model. Default: the first eighth of the target's layers."
        ),
    ] = None,
    agreement: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Acceptance rate of a --draft-shape. Default: 0.8."),
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(
            metavar="DEVICES", help="Start a draft node on each of these devices, such as cuda,cpu."
        ),
    ] = "auto",
    run_ahead: Annotated[
        bool | None,
        typer.Option(
            help="Draft on while the target verifies, on the hardware that both share. Default: on."
        ),
    ] = None,
    both: Annotated[
        bool, typer.Option("--both", help="Two nodes on each device: one that runs ahead, one that does not.")
    ] = False,
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8",
    tokens: Annotated[int, typer.Option(min=2, help="Mean number of tokens per request.")] = 48,
    guesses: Annotated[int, typer.Option(min=1, max=32, help="Draft tokens per pass.")] = 4,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each setting, in turns; medians are reported.")
    ] = 3,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Fraction of GPU memory for the target; draft nodes need the rest.")
    ] = 0.6,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare a draft model in the target's process, on draft nodes of this machine, and plain decoding, in turns.

    Nodes are processes of their own that share the machine with the target, and its GPU where they are on it.

    Example: foreword bench pools --shape llama-8b --draft-shape llama-1b --nodes cuda --both
    """
    from foreword.cluster.settings import need_frames

    need_frames()
    sizes = parse_sizes("--batches", batches)
    if min(sizes) < 1:
        raise RequestError(f"--batches must be at least 1, not {min(sizes)}")
    devices = [name.strip() for name in nodes.split(",") if name.strip()]
    if shape is not None and (draft is not None or model != DEFAULT_MODEL):
        raise RequestError("--shape makes a target and a draft; leave out --model and --draft")
    if shape is None and (draft_shape is not None or agreement is not None):
        raise RequestError(
            "--draft-shape and --agreement are for a pair with random weights: give --shape too"
        )
    if agreement is not None and draft_shape is None:
        raise RequestError("--agreement is for a draft of its own shape: give --draft-shape too")
    if both and run_ahead is not None:
        raise RequestError(
            "--both measures nodes that run ahead and nodes that do not; leave out --run-ahead"
        )
    if shape is None and draft is None:
        raise RequestError("--draft must name the model that drafts, or --shape a pair with random weights")
    from foreword.bench.draft_nodes import measure_pools, ways_of_drafting
    from foreword.bench.skeleton import table
    from foreword.bench.step_cost import random_tokens
    from foreword.engine.config import EngineConfig

    config = EngineConfig(gpu_memory_utilization=gpu_memory_utilization)
    agree = 0.8 if agreement is None else agreement
    with _pair(model, draft, shape, draft_shape, agree) as (target, drafting), ExitStack() as running:
        llm = load_llm(target, dtype, device, backend, config=config)
        prompts = [
            random_tokens(65 + index, llm.engine.target.config.vocab_size)[1:] for index in range(max(sizes))
        ]
        with stage_bar() as on_progress:
            kinds = [True, False] if both else [run_ahead is not False]
            ways = ways_of_drafting(drafting, devices, guesses, running, run_ahead=kinds)
            rows = measure_pools(
                llm.engine,
                ways,
                prompts,
                batches=sizes,
                tokens=tokens,
                repeats=repeats,
                progress=on_progress,
            )
        llm.close()
    columns = {
        "draft model": "{.way}",
        "batch": "{.batch}",
        "tok/s": "{.tokens_per_second:.1f}",
        "x plain": "{.over_plain:.2f}",
        "tok/pass": "{.tokens_per_pass:.2f}",
        "step ms": "{.step_ms:.1f}",
    }
    stdout.print(table(rows, columns))
    if as_json:
        print_json(
            {"model": shape or model, "draft": draft_shape or draft, "rows": [asdict(row) for row in rows]}
        )


@contextmanager
def _pair(
    model: str, draft: str | None, shape: str | None, draft_shape: str | None, agreement: float
) -> Iterator[tuple[str, str]]:
    """The target and its draft."""
    if shape is None:
        assert draft is not None
        yield model, draft
        return
    from foreword.bench.random_models import named_shape, write_agreeing_pair, write_random_pair

    config = named_shape(shape)
    other = None if draft_shape is None else named_shape(draft_shape)
    with TemporaryDirectory() as folder:
        if other is None:
            pair = write_random_pair(config, max(1, len(config.layers) // 8), Path(folder))
        else:
            pair = write_agreeing_pair(config, other, agreement, Path(folder))
        yield str(pair[0]), str(pair[1])
