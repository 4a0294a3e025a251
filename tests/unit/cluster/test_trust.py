"""What a cluster does for its safety without being asked."""

import inspect
import re
from pathlib import Path

import foreword
from foreword.cli.cluster.main import draft_node
from foreword.cluster.address import NodeAddress

PACKAGE = Path(foreword.__file__).parent
RUNS_CODE = re.compile(
    r"^\s*(?:import|from) (?:pickle|cloudpickle|dill|marshal|shelve)\b|allow_pickle=True", re.MULTILINE
)


def test_a_node_listens_on_this_machine_alone_unless_told_otherwise():
    assert NodeAddress.parse(inspect.signature(draft_node).parameters["listen"].default).is_local


def test_nothing_that_runs_code_is_read_from_anywhere():
    """No pickle in the whole package, on a wire or in a file; what torch has written only as numbers."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not RUNS_CODE.search(text), path
        assert text.count("torch.load(") == text.count("weights_only=True"), path
