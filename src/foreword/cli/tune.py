"""`foreword tune`: measure this machine, and write the recommended policy file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.console import (
    DEFAULT_MODEL,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    load_llm,
    print_json,
    stage_bar,
    stdout,
)
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.bench.methods import Method
    from foreword.engine.llm import LLM


def tune(
    model: ModelOption = DEFAULT_MODEL,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with your prompts: turns and category. Default: the shipped prompts."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Policy file to write.")] = Path("speculation-policy.json"),
    methods: Annotated[
        str | None,
        typer.Option(
            help="Drafters: names or JSON objects separated by commas. Default: all that need no settings."
        ),
    ] = None,
    limit_per_category: Annotated[int, typer.Option(help="Use the first N prompts of each category.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure model and drafters on your prompts, and write the recommended policy file.

    Every prompt is answered plainly and with every drafter. `foreword serve --speculation-policy FILE` uses the file.
    """
    from foreword.bench.drafters.measure import BenchSettings, DrafterBench
    from foreword.bench.drafters.summary import drafter_table, summarise
    from foreword.bench.methods import parse_methods
    from foreword.bench.prompts import own_prompts, read_prompts, take_per_category
    from foreword.bench.tune import recommend

    settings = BenchSettings(max_tokens, temperature)
    settings.sampling()  # refuses bad parameters before anything is loaded
    wanted = None if methods is None else parse_methods(methods)
    listed = take_per_category(
        own_prompts() if prompts is None else read_prompts(prompts), limit_per_category
    )
    if not out.parent.is_dir():
        raise RequestError(f"--out {out} cannot be written: there is no directory {out.parent}")
    _require_own(out)
    llm = load_llm(model, dtype, device, backend)
    tried = _available(llm) if wanted is None else wanted
    bench = DrafterBench(llm, tried, settings)
    with stage_bar() as show:
        records = list(
            bench.measure(
                listed,
                (),
                lambda kind, done, total, who: show(f"{who}, {kind} {done + 1}/{total}", done, total),
            )
        )
    order = {method.label: place for place, method in enumerate(tried)}
    rows = summarise(sorted(records, key=lambda record: order[record.drafter]))
    stdout.print(
        drafter_table(rows, f"{model}, {len(listed)} prompts × up to {max_tokens} tokens, plain decoding = 1")
    )
    policy = recommend(rows, tried, _made_with(llm, model))
    out.write_text(json.dumps(policy, indent=2) + "\n", encoding="utf-8")
    stdout.print(f"written: {out}; use it with foreword serve --speculation-policy {out}", soft_wrap=True)
    if as_json:
        print_json({"policy": policy, "file": str(out), "rows": [row.as_json() for row in rows]})


def _require_own(out: Path) -> None:
    """What is replaced must have been written by this command."""
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
    """Those that need no settings, and the head that comes with the model."""
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
