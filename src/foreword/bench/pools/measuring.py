"""A target's speed with a draft model beside it and with draft nodes, in turns."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from foreword.bench.costs.batch import BatchRun, run_batch
from foreword.bench.link import local_node
from foreword.drafters.overrides import SpeculationSetting
from foreword.engine.core import EngineCore

PLAIN = "plain"
WARM = 16
"""Tokens of each request before the clock starts: nodes read the prompts meanwhile."""


@dataclass(frozen=True)
class PoolSpeed:
    """One way of drafting at one batch size; medians of several runs that took turns."""

    way: str
    batch: int
    tokens_per_second: float
    over_plain: float  # median of the ratios to the plain run of the same turn
    tokens_per_pass: float  # of one request
    step_ms: float


def ways_of_drafting(
    draft: str, devices: Sequence[str], guesses: int, nodes: ExitStack, *, run_ahead: Sequence[bool] = (True,)
) -> dict[str, SpeculationSetting]:
    """Nobody, the draft model in the target's process, and for each device a node of each kind, which `nodes` ends."""
    depth = {"num_speculative_tokens": guesses, "fixed": True}
    ways: dict[str, SpeculationSetting] = {
        PLAIN: False,
        "beside the target": {"method": "draft_model", "model": draft, **depth},
    }
    for device in devices:
        for is_ahead in run_ahead:
            address = nodes.enter_context(local_node(draft, "draft_model", device, run_ahead=is_ahead))
            name = f"node on {device}{'' if is_ahead else ', no run-ahead'}"
            ways[name] = {"method": "remote", "drafters": str(address), "shadow": 0, **depth}
    return ways


def measure_pools(
    engine: EngineCore,
    ways: Mapping[str, SpeculationSetting],
    prompts: Sequence[Sequence[int]],
    *,
    batches: Sequence[int],
    tokens: int,
    repeats: int,
    progress: Callable[[str, int, int], None],
) -> list[PoolSpeed]:
    """Every way at every batch size. The first turn warms up and does not count."""
    found, stages = [], len(batches) * (repeats + 1) * len(ways)
    for place, batch in enumerate(batches):
        chosen = [prompts[index % len(prompts)] for index in range(batch)]
        runs: dict[str, list[BatchRun]] = {way: [] for way in ways}
        for turn in range(repeats + 1):
            for number, (way, setting) in enumerate(ways.items()):
                progress(f"{way}, batch {batch}", (place * (repeats + 1) + turn) * len(ways) + number, stages)
                runs[way].append(run_batch(engine, chosen, tokens, setting, warm=WARM))
        found += [_speed(way, batch, its[1:], runs[PLAIN][1:]) for way, its in runs.items()]
    return found


def _speed(way: str, batch: int, runs: Sequence[BatchRun], plain: Sequence[BatchRun]) -> PoolSpeed:
    ratios = [
        run.tokens_per_second / beside.tokens_per_second for run, beside in zip(runs, plain, strict=True)
    ]
    return PoolSpeed(
        way,
        batch,
        median(run.tokens_per_second for run in runs),
        median(ratios),
        median(run.tokens / (run.steps * batch) for run in runs),
        median(1e3 * run.seconds / run.steps for run in runs),
    )
