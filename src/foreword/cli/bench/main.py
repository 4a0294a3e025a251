"""`foreword bench`: benchmarks."""

import typer

from foreword.cli.bench import (
    compare,
    drafters,
    gpu,
    nodes,
    overhead,
    passes,
    scoreboard,
    serve,
    step,
)
from foreword.cli.options.grouped import command

app = typer.Typer(no_args_is_help=True, help="Measure costs and speed, always as ratios within one run.")


@app.callback()
def _group() -> None:
    """Measure costs and speed, always as ratios within one run."""


for _name, _kind in {
    "accept": passes.Accept,
    "adapters": passes.Adapters,
    "batch": passes.Batch,
    "compare": compare.Compare,
    "pools": nodes.Pools,
    "control": drafters.Control,
    "drafters": drafters.Drafters,
    "gpu": gpu.Gpu,
    "link": nodes.Link,
    "overhead": overhead.Overhead,
    "pacing": overhead.Pacing,
    "serve": serve.Serve,
    "scoreboard": scoreboard.Scoreboard,
    "server-overhead": overhead.ServerOverhead,
    "structured": passes.Structured,
    "step": step.Step,
    "quality": step.Quality,
}.items():
    app.command(_name)(command(_kind))
