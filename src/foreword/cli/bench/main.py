"""`foreword bench`: benchmarks."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foreword.cli.bench import (
    accept,
    adapters,
    batch,
    compare,
    control,
    drafters,
    gpu,
    link,
    overhead,
    pacing,
    pools,
    serve,
    server_overhead,
    structured,
)
from foreword.cli.console import (
    DEFAULT_MODEL,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    PlotOption,
    load_llm,
    parse_sizes,
    print_json,
    progress_bar,
    stage_bar,
    stdout,
)
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.backends.interface import Decoder
    from foreword.bench.step_cost import EngineCosts, StepTimer

app = typer.Typer(no_args_is_help=True, help="Measure costs and speed, always as ratios within one run.")
app.command("accept")(accept.accept)

OURS = "foreword"


@app.callback()
def _group() -> None:
    """Measure costs and speed, always as ratios within one run."""


app.command("adapters")(adapters.adapters)
app.command("batch")(batch.batch)
app.command("compare")(compare.compare)
app.command("pools")(pools.pools)
app.command("control")(control.control)
app.command("drafters")(drafters.drafters)
app.command("gpu")(gpu.gpu)
app.command("link")(link.link)
app.command("overhead")(overhead.overhead)
app.command("pacing")(pacing.pacing)
app.command("serve")(serve.serve)
app.command("server-overhead")(server_overhead.server_overhead)
app.command("structured")(structured.structured)


@app.command("step")
def step(
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[
        str, typer.Option(help="Numbers of new tokens in a pass, separated by commas.")
    ] = "1,2,4,8,16",
    context: Annotated[int, typer.Option(help="Committed tokens before the new ones.")] = 256,
    repeats: Annotated[int, typer.Option(help="Timed passes for each number; the median is reported.")] = 15,
    prefill: Annotated[str, typer.Option(help="Also time prompts of these lengths, such as 128,512.")] = "",
    compare: Annotated[str, typer.Option(help="Engine to measure in the same run: llama.cpp.")] = "",
    experts: Annotated[
        int,
        typer.Option(
            help="Time a mixture of this many experts (two active, random weights) against a dense model."
        ),
    ] = 0,
    plot: PlotOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure one target pass over n new tokens, and the ratio to the first n.

    Verifying n-1 draft tokens costs a pass over n: the flatter this curve, the larger the gain of speculation.
    """
    if compare not in ("", "llama.cpp"):
        raise RequestError(f"--compare knows llama.cpp only, not {compare!r}")
    sizes = parse_sizes("--tokens", tokens)
    prompts = parse_sizes("--prefill", prefill) if prefill else []
    from foreword.bench.step_cost import DecoderTimer, check_sizes, compare_step_cost

    llm = load_llm(model, dtype, device, backend)
    target = llm.engine.target
    check_sizes(sizes, context, repeats, target.config.context_length, prompts)
    most = max(*sizes, *prompts, 1)
    timers: dict[str, StepTimer]
    if experts:
        timers = _mixture_timers(target, dtype, device, backend, experts, context, most)
    else:
        timers = {OURS: DecoderTimer(target, context, most)}
    if compare:
        timers |= _llama_cpp_timers(model, context, most)
    with progress_bar("measuring") as on_progress:
        costs = compare_step_cost(timers, sizes, prompts=prompts, repeats=repeats, progress=on_progress)
    _show(costs, context)
    if plot is not None:
        _plot(costs, plot, f"{model}: one pass over n new tokens, context {context}")
    if as_json:
        rows = [asdict(cost) for cost in costs[OURS].steps]
        others = {name: asdict(cost) for name, cost in costs.items() if name != OURS}
        prefills = [asdict(cost) for cost in costs[OURS].prompts]
        print_json({"model": model, "context": context, "prefill": prefills, "compare": others, "rows": rows})


def _mixture_timers(
    target: "Decoder", dtype: str, device: str, backend: str, experts: int, context: int, most_tokens: int
) -> "dict[str, StepTimer]":
    """A random mixture of the model's shape, and a random dense model of the same active size."""
    from foreword.backends.choice import choose_backend, fitted, pick_device
    from foreword.backends.loading import DecoderLoader
    from foreword.bench.random_models import RandomCheckpoint, as_mixture
    from foreword.bench.step_cost import DecoderTimer

    place = pick_device(device)
    shapes = {OURS: as_mixture(target.config, experts), "dense": target.config}
    chosen = choose_backend(backend, dtype, place)
    loader = DecoderLoader(  # both on the one that can run the mixture
        fitted(chosen, shapes[OURS], backend=backend, dtype=dtype, device=place), place
    )
    return {
        name: DecoderTimer(loader.load(RandomCheckpoint(shape)), context, most_tokens)
        for name, shape in shapes.items()
    }


def _llama_cpp_timers(model: str, context: int, most_tokens: int) -> "dict[str, StepTimer]":
    from foreword.bench.peers import FILE_TYPES, quantized_copy
    from foreword.bench.step_cost import LlamaCppTimer
    from foreword.kernels.native import choose_threads
    from foreword.models.sources.builtin import cache_directory
    from foreword.models.sources.resolve import resolve_model

    source, kept = resolve_model(model), cache_directory() / "llama.cpp"
    copies = {kind: quantized_copy(source, kept, kind) for kind in FILE_TYPES}
    return {
        f"llama.cpp {kind}": LlamaCppTimer(path, context, most_tokens, choose_threads())
        for kind, path in copies.items()
    }


def _show(costs: "dict[str, EngineCosts]", context: int) -> None:
    others = [name for name in costs if name != OURS]
    headings = [
        "n",
        "ms",
        "ratio",
        *(f"{name} ms" for name in others),
        *(["best of those"] if others else []),
    ]
    table = Table(*headings, title=f"one pass over n new tokens, context {context}")
    for index, own in enumerate(costs[OURS].steps):
        theirs = [costs[name].steps[index].ms for name in others]
        table.add_row(str(own.n), f"{own.ms:.2f}", f"{own.ratio:.2f}", *_beside(own.ms, theirs))
    for index, prompt in enumerate(costs[OURS].prompts):
        theirs = [costs[name].prompts[index].ms for name in others]
        table.add_row(f"prompt of {prompt.n}", f"{prompt.ms:.1f}", "", *_beside(prompt.ms, theirs))
    stdout.print(table)


def _plot(costs: "dict[str, EngineCosts]", path: Path, title: str) -> None:
    from foreword.bench.pictures import Chart, save_charts

    times = {name: [(float(step.n), step.ms) for step in cost.steps] for name, cost in costs.items()}
    save_charts([Chart("new tokens (n)", "milliseconds", times)], path, title)
    stdout.print(f"plot: {path}", markup=False, soft_wrap=True)


def _beside(own: float, theirs: list[float]) -> list[str]:
    """The others' milliseconds, and ours as a multiple of the best of them."""
    return [*(f"{ms:.2f}" for ms in theirs), *([f"{own / min(theirs):.2f}x"] if theirs else [])]


@app.command("quality")
def quality(
    text: Annotated[
        Path | None,
        typer.Option(help="Text file, or .jsonl with texts. Default: the shipped prompts."),
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read.")] = 10_240,
    forms: Annotated[
        str,
        typer.Option(help="Weight formats of the CPU kernels, such as int8,q4; q8_0 is the reference point."),
    ] = "int8,q4,q8_0",
    as_json: JsonOption = False,
) -> None:
    """Compare the CPU kernels with float32: mean KL divergence and top-1 agreement."""
    from foreword.bench.prompts import own_prompts
    from foreword.bench.quality import measure_quality, read_text
    from foreword.bench.skeleton import table
    from foreword.engine.loader import load_model

    names = forms.split(",")
    with stage_bar() as on_stage:
        on_stage("loading float32", 0, 0)
        reference = load_model(model, dtype="float32", device="cpu", backend="torch")
        read = "\n\n".join(one.text for one in own_prompts()) if text is None else read_text(text)
        ids = reference.tokenizer.encode(read)[:tokens]
        if not ids:
            raise RequestError(f"{text} has no text in it")
        loaders = {name: partial(_native_decoder, model, name) for name in names}
        results = measure_quality(
            reference.decoder, loaders, ids, lambda done, total: on_stage("comparing", done, total)
        )
    columns = {
        "form": "{.form}",
        "mean KL (nats)": "{.mean_kl:.5f}",
        "top-1 agreement": "{.top1_agreement:.2%}",
    }
    stdout.print(table(results, columns, f"against float32, {len(ids)} tokens"))
    if as_json:
        print_json({"model": model, "rows": [asdict(result) for result in results]})


def _native_decoder(model: str, form: str) -> "Decoder":
    from foreword.engine.loader import load_model

    return load_model(model, dtype=form, device="cpu", backend="cpu").decoder
