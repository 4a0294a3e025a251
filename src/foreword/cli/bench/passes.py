"""`foreword bench accept`, `adapters`, `batch`, `structured`: costs of passes and batches."""

from dataclasses import dataclass
from pathlib import Path

from foreword.bench.pictures import Chart, save_charts
from foreword.bench.prompts import own_prompts
from foreword.cli.bench.common import (
    BATCH_SIZES,
    MOST_TOKENS,
    SPECULATIVE_DRAFTER,
    TEMPERATURE,
    TIMED_ROUNDS,
    Benchmark,
)
from foreword.cli.console import progress_bar, stage_bar
from foreword.cli.options.common import json_object, parse_sizes, plot_option, read_text, save_plot
from foreword.cli.options.grouped import option
from foreword.cli.options.model import SpeculationOption, speculation_choice

SAMPLE_TEXT = (
    "The light of the sun looks white, but it is made of all the colours of the rainbow. When it meets the air, "
    "the short blue waves are scattered in all directions far more than the long red ones. So wherever we look up "
    "during the day, some of that scattered blue light reaches our eyes, and the sky seems blue. In the evening "
    "the light has a much longer way through the air, most of the blue is lost on it, and what is left is red."
)
"""A text for measurements on real logits."""


@dataclass(frozen=True, kw_only=True)
class Accept(Benchmark):
    """Measure the time of accepting or rejecting drafts, and its ratio to the target pass that verifies them."""

    temperature: float = option(0.7, TEMPERATURE)
    top_p: float = option(0.9, "Nucleus sampling: probability mass of the tokens kept, such as 0.9.")
    rule: str = option("coupled", "Acceptance rule: coupled, token, block or traversal.")
    chain: int = option(5, "Draft tokens of each request.")
    requests: str = option("1,4,16", BATCH_SIZES)
    repeats: int = option(15, TIMED_ROUNDS)

    def run(self) -> None:
        from foreword.acceptance.params import SamplingParams
        from foreword.acceptance.rules.rule import Rule

        params, rule = SamplingParams(temperature=self.temperature, top_p=self.top_p), Rule.parse(self.rule)
        sizes = parse_sizes("--requests", self.requests)
        from foreword.bench.pass_costs import measure_accept_cost

        llm = self.load()
        with progress_bar("measuring") as show:
            text = llm.tokenizer.encode(SAMPLE_TEXT)
            rows, verify_ms = measure_accept_cost(
                llm.engine.target, text, params, self.chain, rule, sizes, self.repeats, show
            )
        verified = f"one pass over {self.chain + 1} tokens takes {verify_ms:.2f} ms"
        title = f"acceptance of chains of {self.chain}; {verified}"
        self.report(rows, title, rule=self.rule, verify_ms=verify_ms)


@dataclass(frozen=True, kw_only=True)
class Adapters(Benchmark):
    """Measure a decoding pass with LoRA adapters against the same pass without, in turns."""

    batch: int = option(8, "Requests at once, each with an adapter of its own.")
    rank: int = option(16, "Rank of the adapters, which have random weights.")
    repeats: int = option(25, TIMED_ROUNDS)

    def run(self) -> None:
        from foreword.bench.pass_costs import measure_adapters

        llm = self.load()
        with progress_bar("measuring") as show:
            costs = measure_adapters(llm.engine.target, self.batch, self.rank, self.repeats, show)
        title = f"one pass over {self.batch} requests, rank {self.rank}"
        self.report(costs, title, batch=self.batch, rank=self.rank)


@dataclass(frozen=True, kw_only=True)
class Batch(Benchmark):
    """Measure throughput, latency and host time per step by batch size, plain and speculative in turns.

    Greedy, on the shipped prompts, measured while the batch is full and all prompts are read. Host time is a
    step without drafting, the forward pass and acceptance.
    """

    batches: str = option("1,2,4,8,16,32", BATCH_SIZES)
    tokens: int = option(32, "Mean number of tokens per request.")
    repeats: int = option(3, "Runs, plain and speculative in turns; medians are reported.")
    speculative_config: str = option('{"method": "ngram", "num_speculative_tokens": 4}', SPECULATIVE_DRAFTER)
    plot: Path | None = plot_option()

    def run(self) -> None:
        sizes = parse_sizes("--batches", self.batches)
        from foreword.bench.batch import measure_batches

        llm = self.load(self.speculative_config)
        prompts = [llm.encode(prompt.text) for prompt in own_prompts()]
        with stage_bar() as show:
            rows = measure_batches(llm.engine, prompts, sizes, self.tokens, self.repeats, show)
        self.report(rows)
        lines = {
            "plain": [(float(row.batch), row.plain_tokens_per_second) for row in rows],
            "speculative": [(float(row.batch), row.speculative_tokens_per_second) for row in rows],
        }
        charts = [Chart("requests at once", "tokens per second, all requests", lines)]
        title = f"{self.model}: throughput by batch size"
        save_plot(self.plot, lambda path: save_charts(charts, path, title))


@dataclass(frozen=True, kw_only=True)
class Structured(Benchmark):
    """Compare tokens per second and per pass with and without a schema, with and without speculation, in turns."""

    batch: int = option(8, "Concurrent requests.")
    tokens: int = option(96, MOST_TOKENS)
    repeats: int = option(3, TIMED_ROUNDS)
    json_schema: Path | None = option(None, "JSON schema. Default: one with long keys.", metavar="FILE")
    speculation: SpeculationOption = None

    def run(self) -> None:
        from foreword.bench.structured import measure_structured

        given = self.json_schema
        schema = None if given is None else json_object("--json-schema", read_text(given))
        llm = self.load(speculation_choice(self.speculation, None))
        with progress_bar("measuring") as show:
            rows, mask_share = measure_structured(
                llm.engine, llm.encode, self.batch, self.tokens, self.repeats, show, schema
            )
        title = f"{self.batch} requests; the schema adds {mask_share:.1%} to a plain step"
        self.report(rows, title, batch=self.batch, mask_share=mask_share)
