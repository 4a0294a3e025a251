"""`foreword bench server-overhead` on a tiny model: the figures are there and belong to each other."""

import json

import pytest

from helpers.command_line import foreword
from helpers.tiny_models import make_hf_model


def test_engine_and_server_are_compared(tmp_path):
    model = make_hf_model(tmp_path / "long", max_position_embeddings=4096)
    options = ("--streams", "3", "--tokens", "20", "--repeats", "2", "--json")
    run = foreword("bench", "server-overhead", "--model", str(model), *options)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert (told["streams"], told["tokens"], len(told["ratios"])) == (3, 20, 2)
    assert told["engine"]["token_ms"] > 0
    assert told["server"]["token_ms"] > 0
    assert told["engine"]["api_cpu_ms"] == 0
    assert told["ratio"] == pytest.approx(sum(told["ratios"]) / 2)
