"""The fault drill: targets and draft nodes under traffic, with kills, partitions, hangs and nodes that turn hostile."""

from pathlib import Path

import pytest

from foreword.cluster.address import NodeAddress
from foreword.engine.loader import load_model
from helpers.draft_nodes import wait_patiently
from helpers.drafted_answers import noisy_copy
from helpers.fault_drill import Drill, NodeHere, NodeProcess


def test_no_answer_is_lost_or_changed_and_all_recover(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The short form: nodes in this process, a few seconds."""
    wait_patiently(monkeypatch, seconds=0.02)
    loaded = load_model(
        str(noisy_copy(tiny_model, tmp_path / "draft")), dtype="float32", device="cpu", backend="cpu"
    )
    nodes = [NodeHere(loaded, NodeAddress(path=str(tmp_path / f"node{number}"))) for number in range(3)]
    drill = Drill(tiny_model, nodes)
    try:
        drill.run(faults=10, pause=0.3)
        assert all(drill.faults.values())
        assert all(target.rounds for target in drill.targets)
        drill.recover()
        drill.check_nothing_is_left()
    finally:
        drill.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_minutes_of_faults(tiny_model: Path, tmp_path: Path):
    """Nodes in processes of their own, which are killed without a word; targets wait as long as that is worth it."""
    draft = noisy_copy(tiny_model, tmp_path / "draft")
    nodes = [NodeProcess(draft, NodeAddress(path=str(tmp_path / f"node{number}"))) for number in range(3)]
    drill = Drill(tiny_model, nodes)
    try:
        drill.run(pause=8.0, seconds=600)
        assert all(drill.faults.values())
        assert all(target.rounds for target in drill.targets)
        drill.recover()
        drill.check_nothing_is_left()
    finally:
        drill.close()
