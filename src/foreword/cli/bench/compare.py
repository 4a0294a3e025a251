"""`foreword bench compare`: Foreword against other engines."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foreword.cli.bench.common import draw, made, prompts_of
from foreword.cli.console import DEFAULT_MODEL, JsonCommand, ModelOption, plot_option, stage_bar, stdout
from foreword.cli.options.grouped import Command, late, option
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.bench.skeleton import Column


@dataclass(frozen=True, kw_only=True)
class Compare(JsonCommand):
    """Compare speed, time to first token and memory with other engines, each plain and with its own speculation.

    The same file or its equal conversion, the same token ids, greedy, one request at a time, all loaded and warm,
    taking turns. Ratios are of neighbouring answers, to the fastest plain peer, with 95% intervals.
    """

    model: ModelOption = late(DEFAULT_MODEL, -1)
    peers: str | None = option(
        None, "Engines to compare with: llama.cpp,transformers,vllm. Default: those that are installed."
    )
    python: list[str] | None = option(
        None,
        "Python interpreter with that engine: llama.cpp=/opt/bin/python; repeatable.",
        metavar="PEER=PATH",
    )
    draft: str | None = option(None, "Draft model for the engines that support one.", metavar="MODEL")
    dataset: Path | None = option(None, "JSON lines as for `bench drafters`. Default: our own.")
    category: str | None = option(None, "Use only prompts of this category, such as chat. Default: all.")
    limit_per_category: int = option(2, "Use the first N prompts of each category.", min=1)
    max_tokens: int = option(64, "Tokens of every answer.", min=8)
    rounds: int = option(3, "Runs of every prompt.", min=1)
    threads: int | None = option(None, "Threads of every engine. Default: all cores.", min=1)
    plot: Path | None = plot_option()

    def run(self) -> None:
        from foreword.bench.compare import Race, contestants, plot_comparison, summarise
        from foreword.bench.prompts import take_per_category
        from foreword.bench.skeleton import optional, table
        from foreword.engine.prompts import encode_prompt
        from foreword.kernels.native import choose_threads
        from foreword.models.formats.checkpoint import open_checkpoint
        from foreword.models.sources.resolve import resolve_model

        wanted = None if self.peers is None else [name.strip() for name in self.peers.split(",")]
        draft_path = None if self.draft is None else str(resolve_model(self.draft))
        chosen = contestants(wanted, _pythons(self.python), draft_path)
        found = [one for one in prompts_of(self.dataset) if self.category in (None, one.category)]
        prompts = take_per_category(found, self.limit_per_category)
        if not prompts:
            raise RequestError(f"--category {self.category}: there are no such prompts")
        with stage_bar() as show:
            path = resolve_model(self.model, on_progress=show)
            tokenizer = open_checkpoint(path).tokenizer()
            ids = [encode_prompt(tokenizer, prompt.text) for prompt in prompts]
            race = Race(str(path), ids, self.max_tokens, self.rounds, self.threads or choose_threads())
            answers, absent = race.run(chosen, show)
        beside, rows = summarise(answers, chosen)
        size = f"{len(prompts)} prompts × {self.max_tokens} tokens × {self.rounds} rounds"
        title = f"{self.model}, {size}, {race.threads} threads"
        columns: dict[str, Column] = {
            "engine": "{.label}",
            "tokens/s": "{.tokens_per_second:.1f}",
            f"× {beside}": "{0.ratio.middle:.2f} ({0.ratio.low:.2f} to {0.ratio.high:.2f})",
            "first token": "{.first_ms:.0f} ms",
            "memory": lambda row: f"{row.peak_bytes / 2**20:.0f} MiB",
            "same text": lambda row: optional(row.same_as_plain, ".0%", ""),
        }
        stdout.print(table(rows, columns, title))
        for reason in absent:
            stdout.print(reason, markup=False, soft_wrap=True)
        draw(self.plot, lambda path: plot_comparison(rows, beside, path, title))
        self.tell(
            {
                "model": self.model,
                "prompts": len(prompts),
                "max_tokens": self.max_tokens,
                "rounds": self.rounds,
                "threads": race.threads,
                "baseline": beside,
                "rows": [asdict(row) for row in rows],
                "absent": absent,
                "made": made(),
            }
        )


@dataclass(frozen=True, kw_only=True)
class Scoreboard(Command):
    """Write a page of all engines' results from result files (bench compare --json, prove --url --json).

    Example: foreword bench scoreboard --results docs/benchmarks/scoreboard --out docs/scoreboard.md
    """

    results: Path = option(Path("docs/benchmarks/scoreboard"), "Folder with the result files.")
    out: Path = option(Path("docs/scoreboard.md"), "Page to write.")

    def run(self) -> None:
        from foreword.bench.scoreboard import scoreboard_page

        self.out.write_text(scoreboard_page(self.results), encoding="utf-8")
        stdout.print(f"{self.out} is written", soft_wrap=True, markup=False)


def _pythons(given: list[str] | None) -> dict[str, str]:
    named = {}
    for text in given or ():
        name, equals, path = text.partition("=")
        if not equals or not Path(path).is_file():
            raise RequestError(f"--python {text}: give a peer and an interpreter, llama.cpp=/path/to/python")
        named[name] = path
    return named
