"""`foreword bench gpu --json` on a pretend GPU: every way to call it prints one object."""

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from foreword.backends import choice, loading
from foreword.backends.choice import BackendChoice
from foreword.bench import random_models
from foreword.bench.gpu import engines, speculating, tiles
from foreword.bench.gpu.device import PassTime
from foreword.bench.gpu.engines import BatchSpeed, GpuReport, StartTime
from foreword.bench.gpu.speculating import ControlledSpeed, SpeculativeSpeed
from foreword.bench.gpu.tiles import TileTime
from foreword.cli.main import app
from helpers.cuda import needs_triton

START = StartTime(5.0, 0.5, 0.5, 3.0, 40, 45, 0.9, 0.1, 0.005)
REPORT = GpuReport(
    "H", 4.0, 4.1, 700.0, 3.9, [PassTime(1, 1, 4.4, 0.1)], [BatchSpeed(1, 220.0, 4.5, 0.1)], 111.0, 0.7
)
SPEED = SpeculativeSpeed("eagle3", 1, 3.9, 661.0, 6.0, 1.3)
CONTROL = ControlledSpeed(1, 3.9, 220.0, 600.0, 2.8, 2.7, 3.8)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(choice, "pick_device", lambda _: cpu)
    monkeypatch.setattr(choice, "choose_backend", lambda *_: BackendChoice("torch", None, None, ""))
    monkeypatch.setattr(loading, "decoder_of", lambda *_: None)

    class Weights:
        head = torch.zeros(8, 8)
        layers = (type("Layer", (), dict.fromkeys(("qkv", "output", "gate_up", "down"), head)),)

    def told(result: Any) -> Any:
        return lambda *_, **__: result

    monkeypatch.setattr(random_models, "packed_weights", told(Weights))
    monkeypatch.setattr(engines, "measure_start", told((None, START)))
    monkeypatch.setattr(engines, "measure_gpu", told(REPORT))
    monkeypatch.setattr(speculating, "measure_speculation", told([SPEED]))
    monkeypatch.setattr(speculating, "measure_heads", told([SPEED]))
    monkeypatch.setattr(speculating, "measure_controller", told([CONTROL]))
    monkeypatch.setattr(tiles, "compile_ahead", told(None))
    way = TileTime((8, 8), 1, 1, None, 7.0, 4.0, same_bits=True)
    monkeypatch.setattr(tiles, "time_products", told([way]))


def printed(*options: str) -> dict[str, Any]:
    run = CliRunner().invoke(app, ["bench", "gpu", *options, "--json"])
    assert run.exit_code == 0, run.output
    (line,) = run.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@needs_triton
def test_every_measurement_is_one_object(on_gpu: None):
    assert printed("--heads", "1") == {"heads": [asdict(SPEED)]}
    assert printed("--control", "1") == {"control": [asdict(CONTROL)]}
    assert printed("--start") == {"start": asdict(START)}
    ways = printed("--tiles", "1")["tiles"]
    assert [way["product"] for way in ways[::2]] == ["qkv", "output", "gate and up", "down", "head"]
    assert ways[0] == {
        "product": "qkv", "shape": [8, 8], "rows": 1, "parts": 1, "tile": None,
        "microseconds": 7.0, "terabytes": 4.0, "same_bits": True,
    }  # fmt: skip
    whole = printed()
    assert whole["start"]["prepare_seconds"] == 3.0
    assert whole["speculation"] == [asdict(SPEED)] and whole["device"] == "H"


def test_the_table_names_the_start(on_gpu: None, capfd: pytest.CaptureFixture[str]):
    run = CliRunner().invoke(app, ["bench", "gpu", "--start"])
    assert "start to first token: 5.0 s" in run.stdout
    assert "captures 3.0 s (40 of 45 kinds" in " ".join(run.stdout.split())
