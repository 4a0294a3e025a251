"""The simulator against a real engine, alone and with a real draft node: measured and simulated in turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from foreword.bench.batch_runs import run_batch
from foreword.bench.drafters.measure import BenchSettings, DrafterBench
from foreword.bench.drafters.summary import ALL, summarise
from foreword.bench.link import LinkReport
from foreword.bench.methods import Method
from foreword.bench.prompts import BenchPrompt
from foreword.bench.step_cost import DecoderTimer, compare_step_cost
from foreword.engine.llm import LLM
from foreword.progress import StageProgress
from foreword.simulate.calibration import Calibration, with_drafter, with_link, with_steps
from foreword.simulate.scenario import DraftPlacement, FleetSize, Scenario, Traffic
from foreword.simulate.world import World

DrafterRows = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]
"""As `bench drafters --json` has them: all prompts together, and each by itself."""

SECONDS = 60.0
"""That are simulated: chance should not be seen."""


@dataclass(frozen=True)
class Plan:
    """What is tried."""

    method: str  # who guesses
    k: int
    prompts: Sequence[BenchPrompt]  # as many as the largest batch
    batches: Sequence[int] = (1, 4)
    tokens: int = 48  # that each request gains, on average
    warm: int = 16  # before those
    repeats: int = 5
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method

    @property
    def rows(self) -> list[int]:
        """Of the passes that are timed: those that plain and speculative decoding make."""
        return sorted({1, 2, *self.batches, *(batch * (self.k + 1) for batch in self.batches)})

    @property
    def config(self) -> dict[str, Any]:
        return {"method": self.method, "num_speculative_tokens": self.k, "fixed": True, **self.options}


@dataclass(frozen=True)
class Compared:
    """Speculative over plain tokens per second, at one batch size: medians over the repeats."""

    batch: int
    measured: float
    simulated: float
    error: float  # simulated over measured, less 1: the median of the repeats' own
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Cluster:
    """A real draft node, and what its target has just seen of it, with so many requests."""

    config: Mapping[str, Any]  # who guesses: `remote`
    measured: Callable[[int], LinkReport]
    runs_ahead: bool = True


def validate(
    llm: LLM, plan: Plan, on_progress: StageProgress, cluster: Cluster | None = None
) -> list[Compared]:
    """Within every repeat: time passes and the drafter, decode plainly and speculatively, and simulate both."""
    speedups: dict[int, list[tuple[float, float]]] = {batch: [] for batch in plan.batches}
    drafter: DrafterRows | None = None
    for repeat in range(plan.repeats):
        on_progress(f"repeat {repeat + 1}", repeat, plan.repeats)
        if (
            drafter is None or cluster is None
        ):  # of a node, only its acceptance counts, which is always the same
            drafter = _drafter(llm, plan)
        calibration = _calibrate(llm, plan, drafter)
        llm.speculate(
            plan.config if cluster is None else {**cluster.config, "num_speculative_tokens": plan.k}
        )
        for batch in plan.batches:
            measured = _measured(llm, plan, batch)
            known = calibration if cluster is None else _with_node(calibration, cluster, batch)
            speedups[batch].append((measured, _simulated(known, plan, batch, repeat, cluster)))
        llm.speculate(None)
    return [_compared(batch, found) for batch, found in speedups.items()]


def _drafter(llm: LLM, plan: Plan) -> DrafterRows:
    bench = DrafterBench(
        llm, [Method(plan.method, plan.config)], BenchSettings(plan.warm + plan.tokens, ignore_eos=True)
    )
    records = list(bench.measure(plan.prompts, [], lambda *_: None))
    # Every prompt is a kind of its own: a batch has each of them once.
    rows = summarise([replace(record, category=record.prompt) for record in records])
    kinds = [asdict(row) for row in rows if row.category != ALL]
    return next(asdict(row) for row in rows if row.category == ALL), kinds


def _calibrate(llm: LLM, plan: Plan, drafter: DrafterRows) -> Calibration:
    # A pass over n rows guesses n - 1 tokens of its own text, so there must be as many.
    timer = DecoderTimer(llm.engine.target, max(128, plan.rows[-1]), max(plan.rows))
    steps = compare_step_cost({"": timer}, plan.rows, repeats=5)[""].steps
    known = with_steps(Calibration(measured={"steps": ""}), {"rows": [vars(step) for step in steps]})
    return with_drafter(known, *drafter)


def _with_node(known: Calibration, cluster: Cluster, batch: int) -> Calibration:
    link = cluster.measured(batch)
    return with_link(known, {**vars(link), "costs": [vars(cost) for cost in link.costs]}, cluster.runs_ahead)


def _measured(llm: LLM, plan: Plan, batch: int) -> float:
    ids = [llm.encode(prompt.text) for prompt in plan.prompts[:batch]]
    rates = {
        speculate: run_batch(llm.engine, ids, plan.tokens, speculate, warm=plan.warm).tokens_per_second
        for speculate in (False, True)
    }
    return rates[True] / rates[False]


def _simulated(calibration: Calibration, plan: Plan, batch: int, seed: int, cluster: Cluster | None) -> float:
    scenario = Scenario(
        FleetSize(targets=1, nodes=1, batch=batch),
        replace(calibration.network, tail_chance=0.0),
        Traffic(prompt=0, answer=1e9),
        costs=calibration.costs,
        kinds=calibration.kinds[:batch],
        drafting=DraftPlacement.LOCAL if cluster is None else DraftPlacement.REMOTE,
        runs_ahead=cluster is not None and cluster.runs_ahead,
        k=plan.k,
        seconds=SECONDS,
        seed=seed,
    )
    plain = replace(scenario, drafting=DraftPlacement.PLAIN)
    return World(scenario).run().tokens_per_second / World(plain).run().tokens_per_second


def _compared(batch: int, found: Sequence[tuple[float, float]]) -> Compared:
    errors = tuple(simulated / measured - 1 for measured, simulated in found)
    return Compared(
        batch,
        median(measured for measured, _ in found),
        median(simulated for _, simulated in found),
        median(errors),
        errors,
    )
