"""What was learned is kept for the next start, and only what can be believed is used."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foreword.control.acceptance import MAX_ESTIMATES, Estimates
from foreword.control.policy import MeasuredPolicy
from foreword.engine.drafting.saved_estimates import MOST_FILES, SavedEstimates
from foreword.speculation.measured.costs import StepCosts
from helpers.traffic import CPU, H200, TWO_CORES, Traffic, head, lookup


def taught(tokens: int = 3000, seed: int = 0) -> tuple[MeasuredPolicy, Traffic]:
    policy, traffic = MeasuredPolicy(), Traffic(H200, [head(), lookup()], 2, seed=seed)
    traffic.run(policy, tokens)
    return policy, traffic


def kept(path: Path, seed: int = 0) -> tuple[SavedEstimates, MeasuredPolicy, Traffic]:
    policy, traffic = MeasuredPolicy(), Traffic(H200, [head(), lookup()], 2, seed=seed)
    traffic.situation.costs.__init__()  # type: ignore[misc]  # nothing is known
    return SavedEstimates(path, policy, traffic.situation.costs), policy, traffic


def test_a_restart_knows_what_was_known(tmp_path: Path):
    policy, traffic = taught()
    file = tmp_path / "key.json"
    SavedEstimates(file, policy, traffic.situation.costs).save()
    store, fresh, other = kept(file)
    assert store.load()
    for cohort in ("code", "chat"):
        old = policy.estimates.of("head", "", cohort)
        old.refresh(0.0)
        new = fresh.estimates.of("head", "", cohort)
        assert new.rates.accepted[0][0] == pytest.approx(old.rates.accepted[0][0], abs=0.05)
        assert new.rates.coverage[0] == pytest.approx(old.rates.coverage[0], abs=0.05)
    for rows in (1, 8, 40):
        known = traffic.situation.costs.step_seconds(rows)
        assert other.situation.costs.step_seconds(rows) == pytest.approx(known)
    assert other.situation.costs.knows_calls("head")
    assert other.situation.costs.draft_seconds("head", 5) == pytest.approx(
        traffic.situation.costs.draft_seconds("head", 5), rel=0.05
    )


def test_a_restart_is_as_fast_from_its_first_request_on(tmp_path: Path):
    known = warmed = 0.0
    for seed in (0, 1):  # a few requests each, which differ
        policy, traffic = taught(4000, seed)
        file = tmp_path / "key.json"
        SavedEstimates(file, policy, traffic.situation.costs).save()
        store, fresh, other = kept(file, seed)
        store.load()
        warm = Traffic(H200, [head(), lookup()], 2, seed=seed)
        warm.situation = traffic.situation
        known += other.run(fresh, 2000).ratio
        warmed += warm.run(policy, 2000).ratio
        assert {control.reason for control in fresh.options.values() if control.is_on} == {
            "gains"
        }  # none was just tried
    assert known > 0.97 * warmed


class Depths:
    """A policy that notes how deep each step was drafted."""

    def __init__(self, policy: MeasuredPolicy) -> None:
        self._policy, self.planned = policy, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def plan(self, entries: Any, situation: Any) -> Any:
        plans = self._policy.plan(entries, situation)
        self.planned.append(max(0 if one is None or not one.max_nodes else one.max_depth for one in plans))
        return plans


def busy_traffic(slower: Callable[[float], float]) -> Traffic:
    """One request at a time on two cores; every pass and every call of the head takes so much longer."""
    drafter = replace(head(), call=slower(0.0), level=slower(0.5e-3) - slower(0.0))
    return Traffic(lambda rows: slower(TWO_CORES(rows)), [drafter], 1, cohorts=("chat",), noise=0.0)


@pytest.mark.parametrize(
    "slower",
    [lambda seconds: 3 * seconds, lambda seconds: seconds + 0.02, lambda seconds: seconds / 3],
    ids=["3 times as slow", "20 ms per call", "3 times as fast"],
)
def test_costs_that_were_saved_on_a_busy_machine_do_not_decide_the_depth(
    tmp_path: Path, slower: Callable[[float], float]
):
    policy, idle = MeasuredPolicy(), busy_traffic(lambda seconds: seconds)
    idle.run(policy, 3000)
    measured = [(float(rows), TWO_CORES(rows)) for rows in (1, 2, 4, 8, 16)]
    planned = []
    for traffic in (idle, busy_traffic(slower)):
        if traffic is not idle:
            traffic.run(MeasuredPolicy(), 3000)
        SavedEstimates(tmp_path / "key.json", policy, traffic.situation.costs).save()
        policy.steps += 1  # there is something to save
        restarted, fresh = busy_traffic(lambda seconds: seconds), MeasuredPolicy()
        restarted.situation.costs = costs = StepCosts()
        if not SavedEstimates(tmp_path / "key.json", fresh, costs).load(lambda one: one.resembles(measured)):
            costs.restore(idle.situation.costs.as_json())  # measured when the engine starts
        depths = Depths(fresh)
        restarted.run(depths, 100)  # type: ignore[arg-type]
        planned.append(depths.planned)
    true, found = planned
    assert found[3:] == true[3:]


def test_nobody_can_read_whose_cohorts_they_were(tmp_path: Path):
    estimates = Estimates()
    estimates.of("ngram", "secret-tenant", "greedy").requested(4, 0)
    text = json.dumps(estimates.as_json())
    assert "secret-tenant" not in text
    restored = Estimates()
    restored.restore(json.loads(text))
    assert restored.of("ngram", "another", "greedy").counts.requests == 0
    assert restored.of("ngram", "secret-tenant", "greedy").counts.requests == pytest.approx(1, abs=0.01)


def test_what_nobody_has_asked_for_since_stays_kept():
    estimates = Estimates()
    estimates.of("ngram", "me", "greedy").requested(4, 0)
    once = estimates.as_json()
    again = Estimates()
    again.restore(once)
    assert again.as_json()["pairs"] == once["pairs"]


def test_old_knowledge_weighs_little():
    estimates = Estimates()
    pair = estimates.of("ngram", "", "greedy")
    for _ in range(5000):
        pair.requested(4, 4)
        pair.counts.count_level(0, 1, 0)
    restored = Estimates()
    restored.restore(estimates.as_json())
    assert restored.of("ngram", "", "greedy").counts.requests <= 200


def test_the_file_stays_small(tmp_path: Path):
    policy = MeasuredPolicy()
    for number in range(3 * MAX_ESTIMATES):
        policy.estimates.of("ngram", f"tenant {number}", "greedy").requested(8, 3)
    file = tmp_path / "key.json"
    policy.steps = 1
    SavedEstimates(file, policy, Traffic(CPU, [lookup()], 1).situation.costs).save()
    assert file.stat().st_size < 400_000
    for number in range(2 * MOST_FILES):
        policy.steps += 1
        SavedEstimates(
            tmp_path / f"{number}.json", policy, Traffic(CPU, [lookup()], 1).situation.costs
        ).save()
    assert len(list(tmp_path.iterdir())) == MOST_FILES


def damaged(saved: dict[str, Any]) -> list[str]:
    other = {**saved, "key": "other"}
    half = {**saved, "estimates": {}}
    wrong_costs = {**saved, "costs": {**saved["costs"], "steps": [[0, [[1, -5.0]]]]}}
    wrong_calls = {**saved, "costs": {**saved["costs"], "calls": {"head": [1, 2, 3]}}}
    no_numbers = {**saved, "costs": {**saved["costs"], "calls": {"head": [float("nan")] * 14}}}
    endless = {**saved, "costs": {**saved["costs"], "steps": [[float("inf"), [[1, 0.1]]]]}}
    huge = {**saved, "costs": {**saved["costs"], "calls": {"head": [10**400] + [1.0] * 8}}}
    negative = {**saved, "costs": {**saved["costs"], "calls": {"head": [1.0] * 8 + [-1.0]}}}
    useless = {**saved, "costs": {**saved["costs"], "calls": {"head": [1.0] * 4 + [1e308] + [1.0] * 4}}}
    (*pair, counts), *others = saved["estimates"]["pairs"]
    lies = {**counts, "accepted": [[9e8] for _ in counts["accepted"]]}
    wrong_rates = {**saved, "estimates": {"pairs": [[*pair, lies], *others]}}
    cases = [other, half, wrong_costs, wrong_calls, no_numbers, wrong_rates, [], {"key": "another"}]
    cases += [endless, huge, negative, useless]
    return ["", "{", "null", "[" * 100_000, *map(json.dumps, cases)]


def test_a_damaged_or_foreign_file_is_ignored_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    policy, traffic = taught(500)
    file = tmp_path / "key.json"
    SavedEstimates(file, policy, traffic.situation.costs).save()
    saved = json.loads(file.read_text())
    for text in damaged(saved):
        file.write_text(text)
        store, fresh, other = kept(file)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert not store.load(), text[:80]
        assert len(caplog.records) == 1, text[:80]
        assert not fresh.estimates.drafters
        assert not fresh.estimates.saved
        assert other.situation.costs.step_seconds(1) is None
        assert not other.situation.costs.knows_calls("head")
    file.unlink()
    caplog.clear()
    assert not kept(file)[0].load()
    assert not caplog.records  # a first start is nothing to complain about


def test_it_is_saved_soon_then_now_and_then(tmp_path: Path):
    policy, traffic = taught(100)
    file = tmp_path / "key.json"
    store = SavedEstimates(file, policy, traffic.situation.costs)
    times = []
    for tenth in range(2000):
        policy.steps += 1
        file.unlink(missing_ok=True)
        store.save_if_due(tenth / 10)
        if file.exists():
            times.append(tenth / 10)
    assert times[:4] == [2.0, 6.0, 14.0, 30.0]
    assert all(later - earlier == pytest.approx(30) for earlier, later in pairwise(times[4:]))
