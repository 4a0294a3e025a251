"""`foreword bench step` and `foreword bench quality`: time and accuracy of target passes."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from foreword.bench.contestants import OURS
from foreword.bench.pictures import Chart, save_charts
from foreword.bench.prompts import own_prompts
from foreword.cli.bench.common import Benchmark
from foreword.cli.console import fields_of, print_table, progress_bar, stage_bar, stdout
from foreword.cli.options.common import JsonCommand, one_of, parse_sizes, plot_option, save_plot, split_list
from foreword.cli.options.grouped import given, option
from foreword.cli.options.model import DEFAULT_MODEL, DeviceOption, ModelOption
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.backends.interface import Decoder
    from foreword.bench.step_cost import EngineCosts, StepTimer


@dataclass(frozen=True, kw_only=True)
class Step(Benchmark):
    """Measure one target pass over n new tokens, and the ratio to the first n.

    Verifying n-1 draft tokens costs a pass over n: the flatter this curve, the larger the gain of speculation.
    """

    tokens: str = option("1,2,4,8,16", "Numbers of new tokens in a pass, separated by commas.")
    context: int = option(256, "Committed tokens before the new ones.")
    repeats: int = option(15, "Timed passes for each number; the median is reported.")
    prefill: str = option("", "Also time prompts of these lengths, such as 128,512.")
    threads: str = option("", "Measure with these numbers of threads in turn, such as 1,2,4,8 (CPU kernels).")
    compare: str = option("", "Engine to measure in the same run: llama.cpp.")
    experts: int = option(0, "Compare a random mixture of this many experts with a dense model.")
    shape: str = option("", "Time random weights of this shape, such as llama-1b or qwen3.5-0.8b.")
    plot: Path | None = plot_option()

    def run(self) -> None:
        if self.compare not in ("", "llama.cpp"):
            raise RequestError(f"--compare knows llama.cpp only, not {self.compare!r}")
        if self.threads and self.experts:
            raise RequestError("--threads cannot be combined with --experts; leave one out")
        if self.compare and (random := given(self, "shape", "experts")):
            raise RequestError(
                f"--compare needs a model's file, and {random[0]} has random weights; leave one out"
            )
        thread_counts = parse_sizes("--threads", self.threads) if self.threads else []
        sizes = parse_sizes("--tokens", self.tokens)
        prompts = parse_sizes("--prefill", self.prefill) if self.prefill else []
        from foreword.bench.step_cost import DecoderTimer, check_sizes, compare_step_cost

        decoders, with_threads = self._decoders(), ""
        if thread_counts:
            decoders, with_threads = self._by_threads(decoders[OURS], thread_counts)
        check_sizes(sizes, self.context, self.repeats, decoders[OURS].config.context_length, prompts)
        most = max(*sizes, *prompts, 1)
        timers: dict[str, StepTimer] = {
            name: DecoderTimer(decoder, self.context, most) for name, decoder in decoders.items()
        }
        if self.compare:
            timers |= self._llama_cpp_timers(most)
        with progress_bar("measuring") as show:
            costs = compare_step_cost(timers, sizes, prompts=prompts, repeats=self.repeats, progress=show)
        title = f"one pass over n new tokens, context {self.context}{with_threads}"
        stdout.print(_table(costs, title))
        times = {name: [(float(step.n), step.ms) for step in cost.steps] for name, cost in costs.items()}
        chart = Chart("new tokens (n)", "milliseconds", times)
        save_plot(self.plot, lambda path: save_charts([chart], path, f"{self.shape or self.model}: {title}"))
        others = {name: asdict(cost) for name, cost in costs.items()}
        ours = others.pop(OURS)
        results = {"prefill": ours["prompts"], "compare": others, "rows": ours["steps"]}
        self.show_json({"model": self.shape or self.model, "context": self.context, **results})

    def _decoders(self) -> "dict[str, Decoder]":
        """Return the decoders to time: the model, or random weights (--shape), with --experts also as a mixture."""
        from foreword.backends.choice import choose_backend, pick_device
        from foreword.backends.loading import DecoderLoader
        from foreword.bench.random_models import RandomCheckpoint, as_mixture, named_shape

        model = None if self.shape else self.load().engine.target
        if model is not None and not self.experts:
            return {OURS: model}
        config = named_shape(self.shape) if model is None else model.config
        shapes = {OURS: as_mixture(config, self.experts), "dense": config} if self.experts else {OURS: config}
        device = pick_device(self.device)
        numbers = self.dtype, device, self.quantization, self.kv_cache_dtype
        loader = DecoderLoader(choose_backend(self.backend, *numbers), device)
        return {name: loader.load(RandomCheckpoint(shape)) for name, shape in shapes.items()}

    @staticmethod
    def _by_threads(decoder: "Decoder", counts: list[int]) -> "tuple[dict[str, Decoder], str]":
        """Return the decoder with every number of threads, and the first number for the title."""
        from foreword.backends.cpu.decoder import CpuDecoder
        from foreword.kernels.native import choose_threads

        if not isinstance(decoder, CpuDecoder):
            raise RequestError("--threads needs the CPU kernels; use --backend cpu or leave it out")
        first, *others = map(choose_threads, counts)
        decoders: dict[str, Decoder] = {OURS: decoder.with_threads(first)}
        decoders |= {f"{count} threads": decoder.with_threads(count) for count in others}
        return decoders, f", {first} thread{'s' * (first > 1)}"

    def _llama_cpp_timers(self, most_tokens: int) -> "dict[str, StepTimer]":
        from foreword.bench.llama_cpp import FILE_TYPES, LlamaCppTimer, quantized_copy
        from foreword.kernels.native import choose_threads
        from foreword.models.sources.builtin import cache_directory
        from foreword.models.sources.resolve import resolve_model

        source, folder = resolve_model(self.model), cache_directory() / "llama.cpp"
        files = {"stored": source} | {form: quantized_copy(source, folder, form) for form in FILE_TYPES}
        return {
            f"llama.cpp {form}": LlamaCppTimer(path, self.context, most_tokens, choose_threads())
            for form, path in files.items()
        }


def _table(costs: "dict[str, EngineCosts]", title: str) -> Table:
    """Return a table of Foreword's times beside those of the other engines."""
    others = [cost for name, cost in costs.items() if name != OURS]
    headings = [f"{name} ms" for name in costs if name != OURS]
    table = Table("n", "ms", "ratio", *headings, *(["best of those"] if others else []), title=title)

    def add_row(name: str, our_ms: float, digits: int, ratio: str, their_ms: list[float]) -> None:
        best = [f"{our_ms / min(their_ms):.2f}x"] if their_ms else []
        table.add_row(name, f"{our_ms:.{digits}f}", ratio, *(f"{ms:.2f}" for ms in their_ms), *best)

    for index, step in enumerate(costs[OURS].steps):
        add_row(str(step.n), step.ms, 2, f"{step.ratio:.2f}", [cost.steps[index].ms for cost in others])
    for index, prompt in enumerate(costs[OURS].prompts):
        add_row(f"prompt of {prompt.n}", prompt.ms, 1, "", [cost.prompts[index].ms for cost in others])
    return table


# Formats by name: the field of the loader that selects the format, and its value.
_CPU_FORMS = {
    **{form: ("dtype", form) for form in ("int8", "stored", "q4", "q8_0", "float32")},
    **{f"{numbers}-kv": ("kv_cache_dtype", numbers) for numbers in ("float32", "bfloat16", "int8")},
}
_CPU_DEFAULTS = ("int8", "int8+float32-kv", "int8+int8-kv", "stored", "q8_0")
_GPU_FORMS = {
    "fp8": ("quantization", "fp8"),
    "int4": ("quantization", "int4"),
    "fp8-kv": ("kv_cache_dtype", "fp8"),
}


@dataclass(frozen=True, kw_only=True)
class Quality(JsonCommand):
    """Compare quantised models: mean KL divergence and top-1 agreement.

    On a CPU its kernels are compared with float32, on a GPU packed weights and KV with bfloat16.
    """

    text: Path | None = option(None, "Text file, or .jsonl with texts. Default: the shipped prompts.")
    model: ModelOption = DEFAULT_MODEL
    tokens: int = option(10_240, "Tokens of the text to read.", min=1)
    forms: str = option(
        "",
        "Formats to compare: int8, stored, q8_0 (the reference point), float32-kv, bfloat16-kv, int8-kv on a CPU; fp8, "
        "int4, fp8-kv on a GPU; or some of them together, such as stored+float32-kv. Default: all.",
    )
    device: DeviceOption = "cpu"

    def run(self) -> None:
        from foreword.backends.choice import pick_device
        from foreword.bench.quality import measure_quality, read_text
        from foreword.engine.loader import load_model

        shipped = "\n\n".join(one.text for one in own_prompts())
        text = shipped if self.text is None else read_text(self.text)
        on_cpu = pick_device(self.device).type == "cpu"
        exact = "float32" if on_cpu else "bfloat16"

        def load(form: str) -> "Decoder":
            known = _CPU_FORMS if on_cpu else _GPU_FORMS
            packing: dict[str, Any] = {"dtype": "int8" if on_cpu else exact}
            packing |= dict(known[one_of("--forms", part, tuple(known))] for part in form.split("+"))
            backend = "cpu" if on_cpu else "cuda"
            return load_model(self.model, device=self.device, backend=backend, **packing).decoder

        with stage_bar() as show:
            show(f"loading {exact}", 0, 0)
            backend = "torch" if on_cpu else "cuda"
            plain: dict[str, Any] = {"dtype": exact, "backend": backend, "quantization": "none"}
            reference = load_model(self.model, device=self.device, **plain)
            ids = reference.tokenizer.encode(text)[: self.tokens]
            if not ids:
                raise RequestError(f"{self.text} has no text in it")
            defaults = _CPU_DEFAULTS if on_cpu else (*_GPU_FORMS, "fp8+fp8-kv")
            loaders = {name: partial(load, name) for name in split_list(self.forms) or defaults}
            rows = measure_quality(reference.decoder, loaders, ids, partial(show, "comparing"))
        print_table(rows, title=f"against {exact}, {len(ids)} tokens")
        self.show_json({"model": self.model, "rows": fields_of(rows)})
