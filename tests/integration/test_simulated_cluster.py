"""The simulator against a real engine, and against one with a real draft node in a process of its own, on loopback.

`tests/unit/simulate/test_against_cluster.py` has the same comparison with the code of both sides in virtual time.
"""

from pathlib import Path

import pytest

from foreword import LLM
from foreword.bench.link import LinkReport, PassCost
from foreword.bench.prompts import BenchPrompt, own_prompts
from helpers.draft_nodes import asking, remote_of
from helpers.drafted_answers import noisy_copy
from helpers.paced import NODE_PACE, TARGET_PACE, pace, paced_node
from helpers.simulated_runs import Cluster, Plan, validate

PROMPTS = [
    BenchPrompt(str(number), "some", " ".join(["one two three"] * (number + 1))) for number in range(4)
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.model
def test_one_engine_is_as_fast_as_it_is_simulated(default_model: Path):
    llm = LLM(str(default_model), speculation="off")
    plan = Plan("ngram", 4, own_prompts()[:4], tokens=32, warm=0)
    for found in validate(llm, plan, lambda *_: None):
        assert abs(found.error) < 0.05, found


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_target_with_a_node_is_as_fast_as_it_is_simulated(
    tiny_model: Path, tmp_path: Path, runs_ahead: bool
):
    """Both sleep through their passes, so that they do not take each other's time as on one machine they would."""
    llm = LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu", speculation="off")
    pace(llm.engine.target, *TARGET_PACE)
    draft = noisy_copy(tiny_model, tmp_path / "draft")
    plan = Plan("draft_model", 4, PROMPTS, repeats=3, options={"model": str(draft)})
    with paced_node(draft, runs_ahead) as address:

        def seen(batch: int) -> LinkReport:
            (node,) = remote_of(llm).nodes()
            if node.level_ms is None or node.level_ms > 1.5e3 * (NODE_PACE[0] + batch * NODE_PACE[1]):
                pytest.skip(f"this machine is too busy: a level takes {node.level_ms} ms")
            cost = PassCost(batch, 0, 0.0, 0.0, 0.0, node.first_ms, node.level_ms)
            return LinkReport(str(address), 0.1, 0.1, (cost,))

        for found in validate(llm, plan, lambda *_: None, Cluster(asking(address), seen, runs_ahead)):
            assert abs(found.error) < 0.1, found
