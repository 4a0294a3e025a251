"""`foreword bench gpu`: the rates of a GPU, and the fraction that decoding reaches."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from foreword.bench.skeleton import Column
from foreword.cli.bench.common import BATCH_SIZES
from foreword.cli.console import fields_of, print_table, stage_bar, stdout
from foreword.cli.options.common import JsonCommand, parse_sizes
from foreword.cli.options.grouped import flag, option
from foreword.cli.options.model import KvDtypeOption, QuantizationOption
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.bench.gpu.engines import GpuReport, StartTime


@dataclass(frozen=True, kw_only=True)
class Gpu(JsonCommand):
    """Measure engine start, copy and matrix rates, passes by size, plain and speculative decoding, and a long prompt.

    Nothing is downloaded: the model has random weights, which cost what trained ones do. Acceptance is scripted: 3.0
    tokens per pass with drafts that cost nothing, 3.9 with an EAGLE-3 head or a draft model of the shape llama-1b, both
    with random weights.
    """

    shape: str = option(
        "llama-8b",
        "Shape of the model, which gets random weights: llama-8b, llama-1b, qwen2.5-1.5b, gemma-3-12b, qwen3-30b-a3b, "
        "deepseek-v2-lite, gpt-oss-20b, qwen3.5-9b, qwen3-next-22b-a3b, or a path.",
    )
    batches: str = option("1,8,32,64,128", BATCH_SIZES)
    rows: str = option("1,2,4,8,16,32,64", "Tokens of one request in a pass, separated by commas.")
    context: int = option(512, "Committed tokens of every request.")
    tiles: str = option("", "Instead, time all matrix kernels for these numbers of tokens, such as 8,64.")
    speculation: str = option("1,8,32", "Batch sizes of speculative decoding, such as 1,8; empty: skip it.")
    heads: str = option("", "Instead, time drafting with each kind of head at these batch sizes.")
    start: bool = flag("Measure only the time from weights on the device to the first token.")
    control: str = option(
        "",
        "Instead, compare the controller with plain decoding at these batch sizes, with a head of high and "
        "one of low acceptance.",
    )
    backend: str = option("cuda", "Backend: cuda, or torch (the reference).")
    quantization: QuantizationOption = "none"
    kv_cache_dtype: KvDtypeOption = "auto"

    def run(self) -> None:
        speculative = parse_sizes("--speculation", self.speculation) if self.speculation else []
        batch_sizes, row_counts = parse_sizes("--batches", self.batches), parse_sizes("--rows", self.rows)
        from foreword.backends.choice import choose_backend, pick_device
        from foreword.backends.loading import decoder_of, start_compiling
        from foreword.bench.gpu import speculating
        from foreword.bench.gpu.engines import measure_gpu, measure_start
        from foreword.bench.random_models import draft_shape, named_shape, packed_weights
        from foreword.engine.collection import spare_steps

        spare_steps()  # as in the engine's process
        try:
            device = pick_device("cuda")
        except RequestError:
            message = "this needs a CUDA GPU, and torch sees none; `foreword bench step` is for a CPU"
            raise RequestError(message) from None
        choice = choose_backend(self.backend, "bfloat16", device, self.quantization, self.kv_cache_dtype)
        config = named_shape(self.shape)
        if self.tiles:
            from foreword.bench.gpu.tiles import fastest_kernels

            kernels = fastest_kernels(
                packed_weights(config, device, "none"), parse_sizes("--tiles", self.tiles)
            )
            print_table(kernels, _TILES)
            self.show_json({"tiles": [{"product": name} | asdict(kernel) for name, kernel in kernels]})
            return
        if choice.name == "cuda":
            start_compiling(choice, device)
        weights = packed_weights(config, device, self.quantization)
        for name, batches, measure in (
            ("heads", self.heads, speculating.measure_heads),
            ("control", self.control, speculating.measure_controller),
        ):
            if batches:
                decoder, sizes = decoder_of(choice, config, weights), parse_sizes(f"--{name}", batches)
                with stage_bar() as show:
                    speeds = measure(decoder, batches=sizes, context=self.context, progress=show)
                print_table(speeds)
                self.show_json({name: fields_of(speeds)})
                return
        with stage_bar() as show:
            decoder, start = measure_start(
                lambda: decoder_of(choice, config, weights), self.context, partial(show, "preparing passes")
            )
        _print_start(start)
        if self.start:
            self.show_json({"start": asdict(start)})
            return
        smaller = draft_shape(config)
        draft = decoder_of(choice, smaller, packed_weights(smaller, device, self.quantization))
        with stage_bar() as show:
            report = measure_gpu(
                decoder, batches=batch_sizes, rows=row_counts, context=self.context, progress=show
            )
            drafted = speculating.measure_speculation(
                decoder, draft, batches=speculative, context=self.context, progress=show
            )
        _print_report(report)
        if drafted:
            print_table(drafted)
        self.show_json({"start": asdict(start)} | asdict(report) | {"speculation": fields_of(drafted)})


_TILES: dict[str, Column] = {  # of (product, TileTime)
    "product": "{0[0]}",
    "tokens": "{0[1].rows}",
    "parts": "{0[1].parts}",
    "kernel": lambda row: "library" if row[1].tile is None else str(row[1].tile),
    "µs": "{0[1].microseconds:.1f}",
    "TB/s": "{0[1].terabytes:.2f}",
    "same bits": lambda row: "yes" if row[1].same_bits else "no",
}


def _print_start(start: "StartTime") -> None:
    stdout.print(
        f"start to first token: {start.seconds:.1f} s from weights on the device, of which captures "
        f"{start.prepare_seconds:.1f} s ({start.prepared} of {start.wanted} kinds of passes)"
    )
    print_table([start])


def _print_report(report: "GpuReport") -> None:
    stdout.print(
        f"{report.device}: copies {report.copy_terabytes:.2f} TB/s, reads {report.read_terabytes:.2f} TB/s, "
        f"bf16 products {report.matrix_teraflops:.0f} TFLOP/s; all weights once: {report.floor_ms:.2f} ms"
    )
    first_ms = report.rows[0].device_ms
    passes: dict[str, Column] = {
        "tokens in the pass": "{.rows}",
        "pass, ms": "{.device_ms:.3f}",
        "relative to one": lambda row: f"{row.device_ms / first_ms:.2f}",
        "launch, ms": "{.host_ms:.3f}",
    }
    print_table(report.rows, passes)
    speeds: dict[str, Column] = {
        "batch": "{.batch}",
        "tokens/s": "{.tokens_per_second:.0f}",
        "step, ms": "{.step_ms:.3f}",
        "host, ms": "{.host_ms:.3f}",
    }
    if report.batches[0].experts is not None:
        speeds |= {"experts read per layer": "{.experts:.1f}", "reading these, ms": "{.floor_ms:.3f}"}
    print_table(report.batches, speeds)
    rate = f"{report.prompt_rate:.0%} of the matrix rate"
    stdout.print(f"a prompt of 4,096 tokens: {report.prompt_ms:.1f} ms, {rate}")
