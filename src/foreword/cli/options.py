"""Options that several commands have, and checks of them that need nothing heavy to be imported."""

from typing import Annotated

import typer

from foreword.errors import RequestError

SpeculationOption = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        metavar="auto|off",
        help="Whether to guess ahead: auto (default) does where no text can change by it, off never.",
    ),
]
SpeculativeConfigOption = Annotated[
    str | None,
    typer.Option(help='Who guesses ahead, as JSON: {"method": "ngram", "num_speculative_tokens": 5}.'),
]
GenerationConfigOption = Annotated[
    str,
    typer.Option(
        metavar="auto|none",
        help="Sampling parameters that are not given: auto, as the model's makers recommend; none, ours.",
    ),
]


def speculation_wish(speculation: str | None, speculative_config: str | None) -> str:
    """What the two options mean together, as `LLM` takes it."""
    if speculation not in (None, "auto", "off"):
        raise RequestError(
            f"--speculation is auto or off, not {speculation!r}; a method: --speculative-config"
        )
    if speculative_config is None:
        return speculation or "auto"
    if speculation is not None:
        raise RequestError("--speculation and --speculative-config exclude each other; give one")
    return speculative_config
