"""`foreword bench compare`: Foreword against other engines."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword import __version__
from foreword.bench.contestants import Contestant, contestants, engine_versions
from foreword.bench.ledger import Ledger
from foreword.bench.prompts import BenchPrompt, prompts_digest, spec_bench_kinds, take_per_category
from foreword.bench.skeleton import Column, optional
from foreword.cli.bench.common import prompts_of, provenance
from foreword.cli.console import fields_of, print_table, say, stage_bar
from foreword.cli.options.common import JsonCommand, plot_option, save_plot, split_list
from foreword.cli.options.grouped import late, option
from foreword.cli.options.model import DEFAULT_MODEL, DeviceOption, ModelOption
from foreword.errors import RequestError
from foreword.progress import StageProgress

if TYPE_CHECKING:
    from foreword.bench.compare import PeerAnswer, Race


@dataclass(frozen=True, kw_only=True)
class Compare(JsonCommand):
    """Compare speed, time to first token and memory with other engines, each plain and with its own speculation.

    The same file or its equal conversion, the same token ids, greedy, one request at a time, all loaded and warm,
    taking turns. Ratios are of neighbouring answers, to the fastest plain peer, with 95% intervals.
    """

    model: ModelOption = late(DEFAULT_MODEL, -1)
    device: DeviceOption = late("auto", 2)
    peers: str | None = option(None, "Engines: llama.cpp,transformers,vllm. Default: the installed ones.")
    modes: str | None = option(None, "Modes of the engines, such as plain,auto,stored lookup. Default: all.")
    python: list[str] | None = option(
        None, "Python that has an engine, such as vllm=/bin/python; repeatable.", metavar="PEER=PATH"
    )
    draft: str | None = option(None, "Draft model for the engines that support one.", metavar="MODEL")
    dataset: Path | None = option(None, "JSON lines as for `bench drafters`. Default: our own.")
    category: str | None = option(None, "Use only prompts of this category, such as chat. Default: all.")
    limit_per_category: int = option(2, "Use the first N prompts of each category.", min=1)
    max_prompt_tokens: int | None = option(None, "Skip prompts of more tokens. Default: none.", min=1)
    max_tokens: int = option(64, "Tokens of every answer.", min=8)
    rounds: int = option(3, "Runs of every prompt.", min=1)
    threads: int | None = option(None, "Threads of every engine. Default: all cores.", min=1)
    resume: Path | None = option(None, "Store answers in this file and skip those that it has.")
    plot: Path | None = plot_option()

    def run(self) -> None:
        from foreword.backends.choice import pick_device
        from foreword.bench.compare import Race, plot_comparison, speeds_by_category, summarise
        from foreword.kernels.native import choose_threads
        from foreword.models.sources.resolve import resolve_model

        made = provenance() | {"load": f"load {os.getloadavg()[0]:.1f} before it began"}
        device = str(pick_device(self.device))
        draft_path = None if self.draft is None else str(resolve_model(self.draft))
        pythons = named_interpreters(self.python)
        chosen = contestants(split_list(self.peers), pythons, draft_path, split_list(self.modes))
        with stage_bar(is_long=True) as show:
            path = resolve_model(self.model, on_progress=show)
            prompts = self._prompts(path)
            threads = self.threads or choose_threads()
            race = Race(str(path), list(prompts.values()), self.max_tokens, self.rounds, threads, device)
            answers, absent = self._race(race, chosen, list(prompts), show)
        categories = [prompt.category for prompt in prompts]
        baseline, rows = summarise(answers, chosen)
        size = f"{len(prompts)} prompts × {self.max_tokens} tokens × {self.rounds} rounds"
        title = f"{self.model}, {size}, {device}, {race.threads} threads"
        columns: dict[str, Column] = {
            "engine": "{.label}",
            "tokens/s": "{.tokens_per_second:.1f}",
            f"× {baseline}": "{0.ratio.middle:.2f} ({0.ratio.low:.2f} to {0.ratio.high:.2f})",
            "first token": "{.first_ms:.0f} ms",
            "memory": lambda row: f"{row.peak_bytes / 2**20:.0f} MiB",
            "same text": lambda row: optional(row.same_as_plain, ".0%", ""),
        }
        print_table(rows, columns, title)
        say(*absent)
        save_plot(self.plot, lambda path: plot_comparison(rows, baseline, path, title))
        self.show_json(
            {
                "model": self.model,
                "prompts": len(prompts),
                "max_tokens": self.max_tokens,
                "rounds": self.rounds,
                "threads": race.threads,
                "device": device,
                "baseline": baseline,
                "rows": fields_of(rows),
                "categories": speeds_by_category(answers, categories),
                "absent": absent,
                "answers": [_answer_json(answer, categories) for answer in answers],
                "made": made | {"versions": ", ".join(map(" ".join, engine_versions(chosen).items()))},
            }
        )

    def _prompts(self, path: Path) -> dict[BenchPrompt, list[int]]:
        """Return the selected prompts with their token ids; `path` is the model's."""
        from foreword.engine.prompts import encode_prompt
        from foreword.models.formats.checkpoint import open_checkpoint

        prompts = spec_bench_kinds(prompts_of(self.dataset))
        prompts = [prompt for prompt in prompts if self.category in (None, prompt.category)]
        if not prompts:
            raise RequestError(f"--category {self.category}: there are no such prompts")
        tokenizer = open_checkpoint(path).tokenizer()
        ids = {prompt: encode_prompt(tokenizer, prompt.text) for prompt in prompts}
        most = self.max_prompt_tokens
        short = [prompt for prompt in prompts if most is None or len(ids[prompt]) <= most]
        if not short:
            raise RequestError(f"--max-prompt-tokens {most}: every prompt is longer")
        return {prompt: ids[prompt] for prompt in take_per_category(short, self.limit_per_category)}

    def _race(
        self, race: "Race", chosen: list[Contestant], prompts: list[BenchPrompt], show: StageProgress
    ) -> "tuple[list[PeerAnswer], list[str]]":
        """Return what `Race.run` returns; answers are read from the --resume file and added to it."""
        from foreword.bench.compare import PeerAnswer

        if self.resume is None:
            return race.run(chosen, show)
        settings = {
            "model": self.model,
            "version": __version__,
            "max_tokens": self.max_tokens,
            "threads": race.threads,
            "device": race.device,
            "prompts_digest": prompts_digest(prompts),
        }
        ledger = Ledger(self.resume, settings, PeerAnswer)
        labels = {contestant.label for contestant in chosen}
        known = [one for one in ledger.records if one.contestant in labels and one.round < self.rounds]
        return race.run(chosen, show, known, ledger.add)


def _answer_json(answer: "PeerAnswer", categories: list[str]) -> dict[str, Any]:
    """Return the fields of an answer without its tokens, with the category of its prompt."""
    fields = asdict(answer) | {"category": categories[answer.prompt]}
    del fields["token_ids"]
    return fields


def named_interpreters(entries: list[str] | None) -> dict[str, str]:
    """Parse the entries PEER=PATH of `--python`."""
    interpreters = {}
    for entry in entries or ():
        name, equals, path = entry.partition("=")
        if not equals or not Path(path).is_file():
            raise RequestError(f"--python {entry}: give a peer and an interpreter, llama.cpp=/path/to/python")
        interpreters[name] = path
    return interpreters
