"""`foreword bench`: benchmarks."""

import typer

from foreword.cli.bench import compare, drafters, gpu, learn, nodes, overhead, passes, scoreboard, serve, step
from foreword.cli.options.grouped import command

app = typer.Typer(no_args_is_help=True, help="Measure costs and speed, always as ratios within one run.")
for _kind in (
    *(passes.Accept, passes.Adapters, passes.Batch, compare.Compare, nodes.Pools, drafters.Control),
    *(drafters.Drafters, gpu.Gpu, learn.Learn, nodes.Link, overhead.Overhead, overhead.Pacing, serve.Serve),
    *(scoreboard.Scoreboard, overhead.ServerOverhead, passes.Structured, step.Step, step.Quality),
):
    app.command()(command(_kind))
