"""Compares decoding with draft nodes, with a draft model beside the target, and plain decoding."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

from foreword.bench.batch_runs import medians, run_batch, speedup
from foreword.bench.skeleton import PLAIN, stage_of, started_command, take_turns
from foreword.cluster.address import NodeAddress
from foreword.drafters.config import SpeculationSetting
from foreword.engine.core import EngineCore
from foreword.errors import RequestError
from foreword.progress import StageProgress

WARM = 16  # tokens per request before timing, while nodes process the prompts


@contextmanager
def local_node(
    model: str, method: str, device: str = "auto", *, run_ahead: bool = True, options: Sequence[str] = ()
) -> Iterator[NodeAddress]:
    """Start a draft node on this machine, with additional options of `foreword draft-node`."""
    ahead = "--run-ahead" if run_ahead else "--no-run-ahead"
    arguments = ["draft-node", "--model", model, "--method", method, "--device", device, ahead]
    with started_command([*arguments, *options, "--listen", "127.0.0.1:0"]) as (line, _):
        if " drafts on " not in line:
            raise RequestError("the draft node could not be started; see above")
        yield NodeAddress.parse(line.split()[-1])


@dataclass(frozen=True)
class PoolSpeed:
    """One way of drafting at one batch size; medians of interleaved runs."""

    way: str
    batch: int
    tokens_per_second: float
    over_plain: float  # median ratio to the plain run of the same round
    tokens_per_pass: float  # per request
    step_ms: float


def ways_of_drafting(
    draft: str,
    devices: Sequence[str],
    draft_tokens: int,
    nodes: ExitStack,
    *,
    run_ahead: Sequence[bool] = (True,),
) -> dict[str, SpeculationSetting]:
    """Start one draft node per device and run-ahead setting; return these, plain decoding and a local draft model.

    The nodes stop when `nodes` is closed.
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
    """Measure every way of drafting at every batch size, interleaved; the first round is warm-up."""
    found: list[PoolSpeed] = []
    for number, batch in enumerate(batches):
        chosen = [prompts[index % len(prompts)] for index in range(batch)]
        arms = {
            way: partial(run_batch, engine, chosen, tokens, setting, warm=WARM)
            for way, setting in ways.items()
        }
        batch_progress = stage_of(progress, f"batch {batch}", number, len(batches))
        runs_of = take_turns(arms, repeats, batch_progress)
        for way, runs in runs_of.items():
            rate, per_pass, step_ms = medians(runs, "tokens_per_second", "tokens_per_pass", "step_ms")
            ratio = median(speedup(runs, runs_of[PLAIN]))
            found.append(PoolSpeed(way, batch, rate, ratio, per_pass, step_ms))
    return found
