"""What made a figure."""

import sys

import pytest

from foreword.cli.bench.common import provenance


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["bench", "compare", "--python", "llama.cpp=/opt/llama/bin/python"], "--python llama.cpp=python"),
        (["bench", "drafters", "--dataset", "/data/spec_bench.jsonl"], "--dataset spec_bench.jsonl"),
        (["bench", "step", "--plot", "runs/step.png"], "--plot runs/step.png"),
        (["bench", "serve", "--url", "http://127.0.0.1:8000/v1"], "--url http://127.0.0.1:8000/v1"),
    ],
)
def test_the_command_names_no_folder_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, given: list[str], told: str
):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/foreword", *given])
    assert provenance()["command"] == f"foreword {given[0]} {given[1]} {told}"
