"""`foreword generate`: answer one prompt."""

import sys
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
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be given several times.")
    ] = None,
    n: Annotated[int, typer.Option("-n", help="Answers to the same prompt.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Default: fresh entropy.")] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(help='Who guesses ahead, as JSON: {"method": "ngram", "num_speculative_tokens": 5}.'),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is: no chat template.")
    ] = False,
    parse_special: Annotated[
        bool,
        typer.Option(help="With --raw: names of control tokens in the prompt become those tokens."),
    ] = True,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt, streaming text to the terminal.

    Example: foreword generate "Explain why the sky is blue." --temperature 0 --max-tokens 64
    """
    from foreword.acceptance.params import SamplingParams
    from foreword.cli.chat.text import visible

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        n=n,
        seed=seed,
    )
    llm = load_llm(model, dtype, device, backend, speculative_config)

    def show(_: int, text: str) -> None:
        # As it is into a file or a pipe; a terminal gets nothing that could steer it.
        print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)

    streamed = not as_json and n == 1
    output = llm.generate(
        prompt, params, raw=raw, parse_special=parse_special, on_text=show if streamed else None
    )[0]
    for answer in output.outputs:
        if answer.error is not None:
            raise RequestError(answer.error)
    if as_json:
        print_json(output.as_json())
        return
    if not streamed:
        for answer in output.outputs:
            stdout.print(f"[bold]answer {answer.index}[/bold]")
            show(0, answer.text + "\n")
    timings = output.timings
    stdout.print()
    stderr.print(
        f"[dim]{timings.predicted_n} tokens, {timings.predicted_per_second:.1f} tokens/s, "
        f"{timings.prompt_n} prompt tokens in {timings.prompt_ms:.0f} ms, seed {output.outputs[0].seed}[/dim]"
    )
