"""Compares decoding with draft nodes, with a draft model beside the target, and plain decoding."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated

from foreword.bench.batch_runs import medians, run_batch, speedup
from foreword.bench.skeleton import PLAIN, InTable, stage_of, started_command, take_turns
from foreword.cluster.address import NodeAddress
from foreword.drafters.config import SpeculationSetting
from foreword.engine.core import EngineCore
from foreword.errors import RequestError
from foreword.progress import StageProgress

WARM = 16  # tokens per request that do not count, while nodes process the prompts


@contextmanager
def local_node(
    model: str, method: str, device: str = "auto", *, run_ahead: bool = True, options: Sequence[str] = ()
) -> Iterator[NodeAddress]:
    """Run a draft node on this machine within the block, and yield its address.

    `options` are further options of `foreword draft-node`.
    """
    ahead = "--run-ahead" if run_ahead else "--no-run-ahead"
    arguments = ["draft-node", "--model", model, "--method", method, "--device", device, ahead]
    with started_command([*arguments, *options, "--listen", "127.0.0.1:0"]) as (first_line, _):
        if " drafts on " not in first_line:
            raise RequestError("the draft node could not be started; see above")
        yield NodeAddress.parse(first_line.split()[-1])


@dataclass(frozen=True)
class PoolSpeed:
    """Speed with one drafter at one batch size; medians of interleaved runs."""

    way: Annotated[str, InTable("draft model")]  # a key of `ways_of_drafting`
    batch: Annotated[int, InTable("batch")]
    tokens_per_second: Annotated[float, InTable("tok/s", ".1f")]
    over_plain: Annotated[float, InTable("x plain", ".2f")]  # median ratio to the plain run of the same round
    tokens_per_pass: Annotated[float, InTable("tok/pass", ".2f")]  # per request
    step_ms: Annotated[float, InTable("step ms", ".1f")]


def ways_of_drafting(
    draft: str,
    devices: Sequence[str],
    draft_tokens: int,
    nodes: ExitStack,
    *,
    run_ahead: Sequence[bool] = (True,),
) -> dict[str, SpeculationSetting]:
    """Start one draft node per device and run-ahead setting; return the settings of speculation to compare, by name.

    They are plain decoding, the draft model in the target's process, and each node. The nodes stop when `nodes` closes.
    """
    depth = {"num_speculative_tokens": draft_tokens, "fixed": True}
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
    progress: StageProgress,
) -> list[PoolSpeed]:
    """Return the speed of every setting at every batch size, measured interleaved."""
    speeds: list[PoolSpeed] = []
    for number, batch in enumerate(batches):
        chosen = [prompts[index % len(prompts)] for index in range(batch)]
        arms = {
            way: partial(run_batch, engine, chosen, tokens, setting, warm=WARM)
            for way, setting in ways.items()
        }
        runs_by_way = take_turns(arms, repeats, stage_of(progress, f"batch {batch}", number, len(batches)))
        for way, runs in runs_by_way.items():
            rate, per_pass, step_ms = medians(runs, "tokens_per_second", "tokens_per_pass", "step_ms")
            ratio = median(speedup(runs, runs_by_way[PLAIN]))
            speeds.append(PoolSpeed(way, batch, rate, ratio, per_pass, step_ms))
    return speeds
