"""`foreword demo`: the main job on the embedded default model."""

from time import perf_counter
from typing import Annotated

import typer

from foreword.cli.console import DEFAULT_MODEL, load_llm, stdout


def demo(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "Explain why the sky is blue.",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 96,
) -> None:
    """Answer a prompt with the embedded default model and say how fast it went."""
    from foreword.acceptance.params import SamplingParams
    from foreword.bench.memory import peak_resident_bytes

    began = perf_counter()
    llm = load_llm(DEFAULT_MODEL, "auto", "auto")
    resident = peak_resident_bytes() / 1e6
    stdout.print(
        f"[dim]{DEFAULT_MODEL} ready in {perf_counter() - began:.1f} s, {resident:.0f} MB resident[/dim]\n"
    )
    stdout.print(f"[bold]{prompt}[/bold]\n")

    def show(_: int, text: str) -> None:
        stdout.print(text, end="", markup=False, soft_wrap=True)

    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens), on_text=show)[0]
    timings = output.timings
    stdout.print(
        f"\n\n[green]{timings.predicted_n} tokens at {timings.predicted_per_second:.1f} tokens/s[/green], "
        f"{timings.passes} target passes, first token after {timings.prompt_ms:.0f} ms"
    )
