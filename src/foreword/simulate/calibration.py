"""Reads the costs of a simulation from the output of `foreword bench`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from foreword.bench.skeleton import read_output
from foreword.drafters.registry import drafter_kinds
from foreword.errors import RequestError
from foreword.simulate import scenario

_P99 = 2.326  # 99th percentile of the standard normal distribution
_MOST_JITTER = 1.0  # maximum standard deviation of the logarithm of round trips
_FULL_COVERAGE = 0.98  # if this fraction of drafts has the last position, all drafts count as complete


@dataclass(frozen=True)
class Calibration:
    """Costs, acceptance and network of a simulation, and which of them were measured."""

    costs: scenario.SimulatedCosts = scenario.ILLUSTRATIVE
    kinds: tuple[scenario.AcceptanceCurve, ...] = ()
    network: scenario.Network = field(default_factory=scenario.Network)
    measured: dict[str, str] = field(default_factory=dict)  # quantity -> file

    @property
    def assumed(self) -> list[str]:
        """Descriptions of the quantities that were not measured."""
        descriptions = {
            "steps": "the target's passes",
            "drafter": "acceptance and drafting on the target's device",
            "link": "draft nodes and the network",
        }
        return [text for quantity, text in descriptions.items() if quantity not in self.measured]


def calibrate(
    step: Path | None = None,
    drafters: Path | None = None,
    link: Path | None = None,
    method: str | None = None,
) -> Calibration:
    """Read the given files; quantities without a file are assumed."""
    known = Calibration()
    if step is not None:
        known = read_output("--step", step, "foreword bench step --json", partial(with_steps, known))
        known.measured["steps"] = str(step)
    if drafters is not None:
        read = partial(_with_best, known, method=method, path=drafters)
        known, name = read_output("--drafters", drafters, "foreword bench drafters --json", read)
        known.measured["drafter"] = f"{name}, {drafters}"
    if link is not None:
        known = read_output("--link", link, "foreword bench link --json", partial(with_link, known))
        known.measured["link"] = str(link)
    return known


def with_steps(known: Calibration, value: Mapping[str, Any]) -> Calibration:
    """Return the calibration with pass times by rows, and with the time per prompt token if measured."""
    times = sorted({int(row["n"]): _ms(row["ms"]) for row in value["rows"]}.items())
    if not times or times[0][0] != 1:
        raise ValueError("no pass over one row")
    prompts = [(int(row["n"]), _ms(row["ms"])) for row in value.get("prefill", ())]
    prompt = known.costs.prompt
    if prompts:
        longest, seconds = max(prompts)
        prompt = seconds / longest
    elif len(times) > 1:
        prompt = (times[-1][1] - times[0][1]) / (times[-1][0] - 1)
    costs = replace(known.costs, passes=scenario.PassTimes(tuple(times)), prompt=prompt)
    return replace(known, costs=costs)


def with_drafter(
    known: Calibration, total: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> Calibration:
    """Return the calibration with acceptance by kind of work, local drafting time and host time."""
    drafted, passes = total["drafted_per_position"], int(total["passes"])
    if not passes or not sum(drafted):
        raise RequestError(
            f"--drafters: {total['drafter']} drafted nothing there; name another with --method"
        )
    levels = sum(drafted) / max(drafted[0], 1)  # mean levels of non-empty drafts
    draft, other_host = _ms(total["draft_ms"]), _ms(total["accept_ms"]) + _ms(total["rest_ms"])
    parts = [drafter_kinds().get(part) for part in _methods(str(total["drafter"]))]
    drafts_by_level = any(kind is not None and kind.traits.drafts_by_level for kind in parts)
    local = scenario.LevelTimes(draft / levels) if drafts_by_level else scenario.LevelTimes(0.0, first=draft)
    costs, plain_step = replace(known.costs, local=local), _ms(total["plain_step_ms"])
    if "steps" in known.measured:
        host = max(plain_step - costs.passes.seconds(1), 0.0)
    else:  # estimate the pass times from plain steps and from verification
        host, drafted_per_pass = other_host, sum(drafted) / passes
        plain_pass = plain_step - other_host
        per_row = max((_ms(total["verify_ms"]) - plain_pass) / max(drafted_per_pass, 1e-9), 0.0)
        costs = replace(costs, passes=scenario.PassTimes.straight(plain_pass, per_row))
    costs = replace(costs, host=host, drafting_host=max(other_host - host, 0.0))
    return replace(known, costs=costs, kinds=tuple(_acceptance(row) for row in rows))


def _acceptance(row: Mapping[str, Any]) -> scenario.AcceptanceCurve:
    if not sum(row["drafted_per_position"]):
        return scenario.AcceptanceCurve((0.0,), (0.0,))  # the drafter proposed nothing
    return acceptance_of(row["drafted_per_position"], row["accepted_per_position"], int(row["passes"]))


def acceptance_of(drafted: Sequence[int], accepted: Sequence[int], passes: int) -> scenario.AcceptanceCurve:
    """Return the curve from counts by position; positions without drafts are ignored."""
    positions = [position for position, count in enumerate(drafted) if count > 0]
    if not positions or passes < 1:
        raise ValueError("nothing was drafted")
    survival: list[float] = []
    coverage: list[float] = []
    lowest = 1.0  # survival never rises with the position
    for position in positions:
        lowest = min(lowest, accepted[position] / drafted[position])
        survival.append(lowest)
        coverage.append(min(drafted[position] / passes, coverage[-1] if coverage else 1.0))
    is_full = coverage[-1] >= _FULL_COVERAGE
    return scenario.AcceptanceCurve(tuple(survival), (1.0,) if is_full else tuple(coverage))


def with_link(known: Calibration, value: Mapping[str, Any], runs_ahead: bool = True) -> Calibration:
    """Return the calibration with round trips, times per level, and host time.

    With run-ahead, commits reach a node in the middle of one of its rounds, on average: the first level then takes half
    a round more.
    """
    trip, trip_p99 = _ms(value["round_trip_ms"]), _ms(value["round_trip_p99_ms"])
    by_batch = sorted(value["costs"], key=lambda cost: int(cost["batch"]))
    low, high = by_batch[0], by_batch[-1]
    added_requests = max(int(high["batch"]) - int(low["batch"]), 1)
    if low["first_ms"] is None:
        raise RequestError(
            "--link: no level was timed; measure again with more --passes, or a longer --pass-ms"
        )

    def per_added_request(name: str) -> float:
        return max(_ms(high[name] or 0.0) - _ms(low[name] or 0.0), 0.0) / added_requests

    level = _ms(low["level_ms"] or 0.0)
    rounds = 1.5 if runs_ahead else 1.0
    first = max(_ms(low["first_ms"]) - trip - rounds * level, 0.0)
    # Round trips are lognormal around the measured one.
    jitter = min(math.log(max(trip_p99 / trip, 1.0)) / _P99, _MOST_JITTER) if trip else 0.0
    costs = replace(
        known.costs,
        node=scenario.LevelTimes(level, per_added_request("level_ms"), first),
        remote=_ms(low["engine_ms"]),
        remote_per_request=per_added_request("engine_ms"),
    )
    return replace(known, costs=costs, network=replace(known.network, round_trip=trip, jitter=jitter))


def _with_best(
    known: Calibration, value: Mapping[str, Any], method: str | None, path: Path
) -> tuple[Calibration, str]:
    """Return the calibration with the drafter `method` (None: the fastest one), and the drafter's name."""
    totals = [row for row in value["rows"] if row["category"] == "all"]
    if not totals:
        raise ValueError("no row over all kinds of work")
    candidates = [row for row in totals if method is None or row["drafter"] == method]
    if not candidates:
        names = ", ".join(str(row["drafter"]) for row in totals)
        raise RequestError(f"--method {method}: {path} has {names}")
    total = max(candidates, key=lambda row: float(row["speedup"]))
    rows = [row for row in value["rows"] if row["drafter"] == total["drafter"] and row is not total]
    return with_drafter(known, total, rows), str(total["drafter"])


def _methods(label: str) -> list[str]:
    """Return the drafters' names in a label such as `suffix+draft_model` or `eagle3 (random)`."""
    return [part.split()[0].split("(")[0] for part in label.split("+") if part.split()]


def _ms(value: float) -> float:
    """Return a time in milliseconds as seconds; raise `ValueError` if it is none."""
    seconds = float(value) / 1e3
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{value} is not a time in milliseconds")
    return seconds
