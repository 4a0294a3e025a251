"""`foreword demo`: plain and speculative decoding side by side."""

from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.bench.skeleton import Column
from foreword.cli.console import load_llm, print_table, progress_bar, stdout
from foreword.cli.options.model import DEFAULT_MODEL, ModelOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foreword.acceptance.params import SamplingParams
    from foreword.bench.drafters.decode import Record
    from foreword.engine.llm import LLM

PROMPTS = {
    "a question": "Explain why the sky is blue.",
    "code": "Write a Python function that tells whether a word is a palindrome, with an example.",
    "arithmetic": "A train travels 60 miles per hour for 2.5 hours. How far does it go? Explain step by step.",
}


def demo(
    model: ModelOption = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 96,
) -> None:
    """Answer three prompts with plain decoding and with the model's default drafter.

    Exit code 1 if a text differs. Example: foreword demo --model qwen2.5-coder-1.5b
    """
    from foreword.acceptance.params import SamplingParams
    from foreword.bench.peers import peak_resident_bytes

    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    began = perf_counter()
    # `auto` drafts only with kernels on which speculation cannot change a text.
    llm = load_llm(model, device="cpu", speculation="auto")
    resident = peak_resident_bytes() / 1e6
    stdout.print(f"[dim]{model} ready in {perf_counter() - began:.1f} s, {resident:.0f} MB resident[/dim]")
    drafter = llm.engine.drafters.default_config
    if drafter is None:
        stdout.print("[yellow]Speculation is off on this machine: see `foreword doctor`.[/yellow]")
        raise typer.Exit(1)
    name = "+".join(drafter.method)
    records = [_answer_twice(llm, kind, prompt, params, name) for kind, prompt in PROMPTS.items()]
    stdout.print()
    _print_comparison(records)
    different = [record.category for record in records if not record.identical]
    if different:
        stdout.print(f"[red]The texts differ: {', '.join(different)}.[/red]")
        raise typer.Exit(1)
    stdout.print("[green]The texts are identical: speculation saved passes and changed no token.[/green]")


def _answer_twice(llm: "LLM", kind: str, prompt: str, params: "SamplingParams", drafter: str) -> "Record":
    """Stream the speculative answer, then compute the plain one silently."""
    from foreword.bench.drafters.decode import Record, decode
    from foreword.models.tokenization.detokenizer import IncrementalDetokenizer

    stdout.print(f"\n[bold]{prompt}[/bold]")
    detokenizer = IncrementalDetokenizer(llm.tokenizer)
    ids = llm.encode(prompt)

    def show(tokens: "Sequence[int]") -> None:
        text = "".join(detokenizer.push(token) for token in tokens)
        stdout.print(text, end="", markup=False, soft_wrap=True)

    speculative = decode(llm.engine, ids, params, on_tokens=show)
    stdout.print(detokenizer.finish(), markup=False)
    with progress_bar("the same with plain decoding") as on_progress:
        done = 0

        def count(tokens: "Sequence[int]") -> None:
            nonlocal done
            done += len(tokens)
            on_progress(done, params.max_tokens)

        plain = decode(llm.engine, ids, params, speculation=False, on_tokens=count)
    return Record(drafter, prompt, kind, speculative, plain)


def _print_comparison(records: "Sequence[Record]") -> None:
    """Print a table with a plain and a speculative line per prompt."""
    lines = []  # prompt, decoding, times, speed-up
    for record in records:
        plain, speculative = record.plain, record.speculative
        speedup = f"{plain.seconds / speculative.seconds:.2f}×" if speculative.seconds else ""
        lines += [(record.category, "plain", plain, ""), ("", record.drafter, speculative, speedup)]
    columns: dict[str, Column] = {
        "prompt": "{0[0]}",
        "decoding": "{0[1]}",
        "passes": "{0[2].passes}",
        "tokens/pass": lambda line: f"{line[2].tokens_per_pass:.2f}" if line[2].passes else "-",
        "accepted": lambda line: f"{line[2].accepted} of {line[2].drafted}" if line[2].drafted else "-",
        "seconds": "{0[2].seconds:.2f}",
        "speed-up": "{0[3]}",
    }
    print_table(lines, columns, "decoding, without the pass over the prompt")
