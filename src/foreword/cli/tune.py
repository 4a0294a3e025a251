"""`foreword tune`: measure this machine, and write the recommended policy file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword.cli.bench.common import MOST_TOKENS, TEMPERATURE, prompts_of
from foreword.cli.console import ModelCommand, stage_bar, stdout
from foreword.cli.options.grouped import command, option
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.bench.methods import Method
    from foreword.engine.llm import LLM


@dataclass(frozen=True, kw_only=True)
class Tune(ModelCommand):
    """Measure model and drafters on your prompts, and write the recommended policy file.

    Every prompt is answered plainly and with every drafter. `foreword serve --speculation-policy FILE` uses the file.
    """

    prompts: Path | None = option(
        None, "JSON lines with your prompts: turns and category. Default: the shipped prompts."
    )
    out: Path = option(Path("speculation-policy.json"), "Policy file to write.")
    methods: str | None = option(
        None, "Drafters: names or JSON objects separated by commas. Default: all that need no settings."
    )
    limit_per_category: int = option(2, "Use the first N prompts of each category.")
    max_tokens: int = option(64, MOST_TOKENS)
    temperature: float = option(0.0, TEMPERATURE)

    def run(self) -> None:
        from foreword.bench.drafters.measure import BenchSettings, DrafterBench
        from foreword.bench.drafters.summary import drafter_table, summarise
        from foreword.bench.methods import parse_methods
        from foreword.bench.prompts import take_per_category
        from foreword.bench.tune import recommend

        settings, out = BenchSettings(self.max_tokens, self.temperature), self.out
        settings.sampling()  # refuse invalid parameters before loading
        wanted = None if self.methods is None else parse_methods(self.methods)
        listed = take_per_category(prompts_of(self.prompts), self.limit_per_category)
        if not out.parent.is_dir():
            raise RequestError(f"--out {out} cannot be written: there is no directory {out.parent}")
        _require_own(out)
        llm = self.load()
        tried = _available(llm) if wanted is None else wanted
        with stage_bar() as show:

            def on_progress(kind: str, done: int, total: int, drafter: str) -> None:
                show(f"{drafter}, {kind} {done + 1}/{total}", done, total)

            records = list(DrafterBench(llm, tried, settings).measure(listed, (), on_progress))
        order = {method.label: place for place, method in enumerate(tried)}
        rows = summarise(sorted(records, key=lambda record: order[record.drafter]))
        size = f"{len(listed)} prompts × up to {self.max_tokens} tokens"
        stdout.print(drafter_table(rows, f"{self.model}, {size}, plain decoding = 1"))
        policy = recommend(rows, tried, _made_with(llm, self.model))
        out.write_text(json.dumps(policy, indent=2) + "\n", encoding="utf-8")
        stdout.print(f"written: {out}; use it with foreword serve --speculation-policy {out}", soft_wrap=True)
        self.show_json({"policy": policy, "file": str(out), "rows": [asdict(row) for row in rows]})


tune = command(Tune)


def _require_own(out: Path) -> None:
    """Raise `RequestError` unless an existing file was written by this command."""
    from foreword.bench.tune import WRITTEN_BY

    if not out.exists():
        return
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
        is_own = found["notes"]["by"] == WRITTEN_BY
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_own = False
    if not is_own:
        raise RequestError(
            f"--out {out} is there already and was not written by foreword tune; name another file"
        )


def _available(llm: "LLM") -> "list[Method]":
    """Return drafters that need no settings, and the model's shipped head."""
    from foreword.bench.methods import Method, default_methods

    methods = default_methods(without="prediction")
    choice = llm.loaded.choose_speculation("auto").config
    if choice is not None and dict(choice.options).get("model"):
        given: dict[str, Any] = {"method": choice.method[0], **dict(choice.options)}
        methods.insert(0, Method("head", given | {"num_speculative_tokens": choice.num_speculative_tokens}))
    return methods


def _made_with(llm: "LLM", model: str) -> dict[str, Any]:
    """Return notes for readers of the file."""
    from foreword import __version__

    target = llm.engine.target
    points = llm.engine.situation.costs.step_table(16, 64) or []
    return {
        "model": model,
        "device": str(target.device),
        "version": __version__,
        "step_ms_by_rows": {
            str(rows): round(1e3 * points[rows], 3) for rows in (1, 2, 4, 8, 16) if rows < len(points)
        },
    }
