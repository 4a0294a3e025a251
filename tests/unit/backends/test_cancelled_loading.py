"""Loading for an engine that is closed meanwhile ends with the tensor that is being read."""

from pathlib import Path
from threading import Event

import pytest
import torch

from foreword.backends.torch.weights import load_weights
from foreword.cancellation import cancelled_by
from foreword.errors import EngineStopped
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.heads.opening import open_head
from helpers.tiny_heads import TinyHead


def test_the_weights_of_a_model(tiny_model: Path):
    checkpoint, closed, done = open_checkpoint(tiny_model), Event(), []

    def progress(count: int, total: int) -> None:
        done.append(count)
        if count == 3:
            closed.set()

    with cancelled_by(closed), pytest.raises(EngineStopped, match="closed"):
        load_weights(checkpoint, torch.float32, torch.device("cpu"), progress)
    assert done == [1, 2, 3]
    load_weights(checkpoint, torch.float32, torch.device("cpu"), progress)  # cancelled within the block alone


def test_the_weights_of_a_head(tmp_path: Path):
    head, closed = open_head(TinyHead(360).eagle().save(tmp_path / "eagle")), Event()
    with cancelled_by(closed):
        name = "layers.0.self_attn.q_proj.weight"
        assert head.load(name).isfinite().all()
        closed.set()
        with pytest.raises(EngineStopped, match="closed"):
            head.load(name)
