"""`foreword generate`: answer one prompt."""

from typing import Annotated

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
    stderr,
    stdout,
)
from foreword.errors import RequestError


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask. Sent through the model's chat template.")],
    model: ModelOption = DEFAULT_MODEL,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Most likely tokens that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="The k most likely tokens; 0: all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least likelihood relative to the most likely token.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Default: fresh entropy.")] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(help='Who guesses ahead, as JSON: {"method": "ngram", "num_speculative_tokens": 5}.'),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is: no chat template.")
    ] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt, streaming text to the terminal.

    Example: foreword generate "Explain why the sky is blue." --temperature 0 --max-tokens 64
    """
    from foreword.acceptance.params import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_tokens=max_tokens, seed=seed
    )
    llm = load_llm(model, dtype, device, backend, speculative_config)

    def show(_: int, text: str) -> None:
        stdout.print(text, end="", markup=False, soft_wrap=True)

    output = llm.generate(prompt, params, raw=raw, on_text=None if as_json else show)[0]
    if (error := output.outputs[0].error) is not None:
        raise RequestError(error)
    if as_json:
        print_json(output.as_json())
        return
    timings = output.timings
    stdout.print()
    stderr.print(
        f"[dim]{timings.predicted_n} tokens, {timings.predicted_per_second:.1f} tokens/s, "
        f"{timings.prompt_n} prompt tokens in {timings.prompt_ms:.0f} ms, seed {output.outputs[0].seed}[/dim]"
    )
