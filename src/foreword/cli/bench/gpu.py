"""`foreword bench gpu`: the rates of a GPU, and the fraction that decoding reaches."""

import gc
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.cli.console import JsonOption, parse_sizes, print_json, stage_bar, stdout
from foreword.errors import RequestError

if TYPE_CHECKING:
    import torch

    from foreword.backends.torch.weights import DecoderWeights
    from foreword.bench.gpu.engines import GpuReport, StartTime
    from foreword.bench.gpu.speculating import ControlledSpeed, SpeculativeSpeed
    from foreword.bench.gpu.tiles import TileTime


def gpu(
    shape: Annotated[
        str,
        typer.Option(help="Shape of the model, which gets random weights: llama-8b, llama-1b, or a path."),
    ] = "llama-8b",
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,32,64,128",
    rows: Annotated[
        str, typer.Option(help="Tokens of one request in a pass, separated by commas.")
    ] = "1,2,4,8,16,32,64",
    context: Annotated[int, typer.Option(help="Committed tokens of every request.")] = 512,
    tiles: Annotated[
        str,
        typer.Option(
            help="Instead, time all matrix product kernels for these numbers of tokens, such as 8,64."
        ),
    ] = "",
    speculation: Annotated[
        str, typer.Option(help="Batch sizes of speculative decoding, separated by commas; empty: skip it.")
    ] = "1,8,32",
    heads: Annotated[
        str,
        typer.Option(
            help="Instead, time drafting with each kind of head, captured and in torch, at these batch sizes."
        ),
    ] = "",
    start: Annotated[
        bool,
        typer.Option("--start", help="Measure only the time from weights on the device to the first token."),
    ] = False,
    control: Annotated[
        str,
        typer.Option(
            help="Instead, compare the controller with plain decoding at these batch sizes, with a head of high and "
            "one of low acceptance."
        ),
    ] = "",
    backend: Annotated[str, typer.Option(help="Backend: cuda, or torch (the reference).")] = "cuda",
    as_json: JsonOption = False,
) -> None:
    """Measure engine start, copy and matrix rates, passes by size, plain and speculative decoding, and a long prompt.

    Nothing is downloaded: the model has random weights, which cost what trained ones do. Acceptance is scripted: 3.0
    tokens per pass with drafts that cost nothing, 3.9 with an EAGLE-3 head or a draft model of the shape llama-1b, both
    with random weights.
    """
    guessed = parse_sizes("--speculation", speculation) if speculation else []
    sizes, counts = parse_sizes("--batches", batches), parse_sizes("--rows", rows)
    import torch

    from foreword.backends.choice import choose_backend
    from foreword.backends.loading import decoder_of
    from foreword.bench.gpu.engines import measure_gpu, measure_start
    from foreword.bench.gpu.speculating import measure_controller, measure_heads, measure_speculation
    from foreword.bench.random_models import draft_shape, named_shape, random_weights

    gc.freeze()  # as the engine's process does
    device = _gpu()
    choice = choose_backend(backend, "bfloat16", device)
    config = named_shape(shape)
    weights = random_weights(config, torch.bfloat16, device)
    if tiles:
        ways = _fastest(weights, parse_sizes("--tiles", tiles))
        _print_tiles(ways)
        if as_json:
            print_json({"tiles": [{"product": name} | asdict(way) for name, way in ways]})
        return
    if heads:
        decoder = decoder_of(choice, config, weights)
        with stage_bar() as on_progress:
            by_head = measure_heads(
                decoder, batches=parse_sizes("--heads", heads), context=context, progress=on_progress
            )
        _print_speculation(by_head)
        if as_json:
            print_json({"heads": [asdict(speed) for speed in by_head]})
        return
    if control:
        decoder = decoder_of(choice, config, weights)
        with stage_bar() as on_progress:
            controlled = measure_controller(
                decoder, batches=parse_sizes("--control", control), context=context, progress=on_progress
            )
        _print_control(controlled)
        if as_json:
            print_json({"control": [asdict(speed) for speed in controlled]})
        return
    with stage_bar() as on_progress:
        decoder, started = measure_start(
            lambda: decoder_of(choice, config, weights),
            context,
            lambda done, total: on_progress("preparing passes", done, total),
        )
    _print_start(started)
    if start:
        if as_json:
            print_json({"start": asdict(started)})
        return
    smaller = draft_shape(config)
    draft = decoder_of(choice, smaller, random_weights(smaller, torch.bfloat16, device))
    with stage_bar() as on_progress:
        report = measure_gpu(decoder, batches=sizes, rows=counts, context=context, progress=on_progress)
        speeds = measure_speculation(decoder, draft, batches=guessed, context=context, progress=on_progress)
    _print(report)
    _print_speculation(speeds)
    if as_json:
        print_json(
            {"start": asdict(started)} | asdict(report) | {"speculation": [asdict(speed) for speed in speeds]}
        )


def _gpu() -> "torch.device":
    from foreword.backends.choice import pick_device

    try:
        return pick_device("cuda")
    except RequestError:
        message = "this needs a CUDA GPU, and torch sees none; `foreword bench step` is for a CPU"
        raise RequestError(message) from None


def _fastest(weights: "DecoderWeights", rows: list[int]) -> "list[tuple[str, TileTime]]":
    """The fastest ways and the library's, by product and number of rows."""
    from foreword.backends.cuda.products import Products
    from foreword.bench.gpu.tiles import candidates, compile_ahead, time_products

    layer, products = weights.layers[0], Products()
    matrices = {
        "qkv": (layer.qkv, layer.qkv.shape[1]),
        "output": (layer.output, products.part_depth(layer.output)),
        "gate and up": (layer.gate_up, layer.gate_up.shape[1]),
        "down": (layer.down, products.part_depth(layer.down)),
        "head": (weights.head, weights.head.shape[1]),
    }
    fastest = []
    for count in rows:
        ways = list(candidates(count))
        compile_ahead(ways, workers=os.cpu_count() or 1)
        for name, (matrix, part_depth) in matrices.items():
            found = time_products(matrix, part_depth, count, ways)
            library = next(way for way in found if way.tile is None)
            fastest += [(name, way) for way in (*found[:3], library)]
    return fastest


def _print_tiles(ways: "list[tuple[str, TileTime]]") -> None:
    table = Table("product", "tokens", "parts", "kernel", "µs", "TB/s", "same bits", box=SIMPLE_HEAD)
    for name, way in ways:
        shape = "library" if way.tile is None else str(way.tile)
        figures = f"{way.microseconds:.1f}", f"{way.terabytes:.2f}", "yes" if way.same_bits else "no"
        table.add_row(name, str(way.rows), str(way.parts), shape, *figures)
    stdout.print(table)


def _print_start(start: "StartTime") -> None:
    stdout.print(
        f"start to first token: {start.seconds:.1f} s from weights on the device, of which captures "
        f"{start.prepare_seconds:.1f} s ({start.prepared} of {start.wanted} sizes of passes)"
    )
    table = Table(
        "products", "KV memory", "captures", "cost profile", "first token", "second token", box=SIMPLE_HEAD
    )
    table.add_row(
        f"{start.decoder_seconds:.2f} s",
        f"{start.memory_seconds:.2f} s",
        f"{start.prepare_seconds:.2f} s",
        f"{start.profile_seconds:.2f} s",
        f"{1e3 * start.first_token_seconds:.0f} ms",
        f"{1e3 * start.second_token_seconds:.0f} ms",
    )
    stdout.print(table)


def _print(report: "GpuReport") -> None:
    from foreword.bench.skeleton import Column, table

    stdout.print(
        f"{report.device}: copies {report.copy_terabytes:.2f} TB/s, reads {report.read_terabytes:.2f} TB/s, "
        f"bf16 products {report.matrix_teraflops:.0f} TFLOP/s; all weights once: {report.floor_ms:.2f} ms"
    )
    one = report.rows[0].device_ms
    passes: dict[str, Column] = {
        "tokens in the pass": "{.rows}",
        "pass, ms": "{.device_ms:.3f}",
        "relative to one": lambda row: f"{row.device_ms / one:.2f}",
        "launch, ms": "{.host_ms:.3f}",
    }
    stdout.print(table(report.rows, passes))
    speeds = {"batch": "{.batch}", "tokens/s": "{.tokens_per_second:.0f}", "step, ms": "{.step_ms:.3f}"}
    stdout.print(table(report.batches, speeds | {"host, ms": "{.host_ms:.3f}"}))
    stdout.print(
        f"a prompt of 4,096 tokens: {report.prompt_ms:.1f} ms, {report.prompt_rate:.0%} of the matrix rate"
    )


def _print_speculation(speeds: "list[SpeculativeSpeed]") -> None:
    from foreword.bench.skeleton import table

    columns = {
        "drafts": "{.drafter}",
        "batch": "{.batch}",
        "tokens per pass": "{.tokens_per_pass:.2f}",
        "tokens/s": "{.tokens_per_second:.0f}",
        "step, ms": "{.step_ms:.3f}",
        "drafting, ms": "{.draft_ms:.3f}",
    }
    if speeds:
        stdout.print(table(speeds, columns))


def _print_control(speeds: "list[ControlledSpeed]") -> None:
    from foreword.bench.skeleton import table

    columns = {
        "batch": "{.batch}",
        "head, tokens per pass": "{.offered:.1f}",
        "plain, tokens/s": "{.plain_tokens_per_second:.0f}",
        "controller": "{.tokens_per_second:.0f}",
        "relative to plain": "{.ratio:.3f}",
        "lowest": "{.lowest:.3f}",
        "tokens per pass": "{.tokens_per_pass:.2f}",
    }
    stdout.print(table(speeds, columns))
