"""`foreword warm`: compile the GPU kernels of a model before it is served."""

from typing import Annotated

import typer

from foreword.cli.console import JsonOption, ModelArgument, load_llm, print_json, stage_bar, stdout
from foreword.errors import RequestError


def warm(
    model: ModelArgument,
    speculation: Annotated[
        str, typer.Option(help="Drafter whose kernels are compiled, as for generate.")
    ] = "auto",
    quantization: Annotated[str, typer.Option(help="Weights: auto, none, fp8 or int4.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Most requests at once.", min=1)] = 64,
    as_json: JsonOption = False,
) -> None:
    """Compile all kernels that a model needs on this GPU; later starts find them on disk.

    Example: foreword warm smollm2-135m
    """
    import torch

    if not torch.cuda.is_available():
        raise RequestError("foreword warm needs a CUDA GPU; other backends compile nothing")
    from foreword.engine.config import EngineConfig
    from foreword.engine.preparing import compile_passes

    config = EngineConfig(max_num_seqs=max_num_seqs)
    llm = load_llm(
        model,
        dtype="auto",
        device="cuda",
        backend="cuda",
        quantization=quantization,
        speculation=speculation,
        config=config,
    )
    with stage_bar() as on_stage:
        count = compile_passes(
            llm.engine, max_num_seqs, lambda done, total: on_stage("compiling kernels", done, total)
        )
    if as_json:
        print_json({"model": model, "kernels": count})
    else:
        stdout.print(
            f"{model}: {count} kernels are compiled for {torch.cuda.get_device_name()}", soft_wrap=True
        )
