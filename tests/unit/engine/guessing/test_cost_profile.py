"""What is kept of a machine's costs."""

from pathlib import Path

import pytest
import torch

from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.guessing.cost_profile import _read, engine_key
from foreword.engine.parts import EngineParts
from foreword.engine.vocabulary import Vocabulary
from helpers.mixed_configs import CONFIGS
from helpers.random_checkpoint import RandomCheckpoint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"points": []}',
        '{"points": [[1, 0]]}',
        '{"points": [[0, 0.1]]}',
        '{"points": [[1e999, 0.1]]}',
        '{"points": [[1, 1e999]]}',
        '{"points": [[1, NaN]]}',
        f'{{"points": [[1, {10**400}]]}}',
    ],
)
def test_a_damaged_profile_is_none(tmp_path: Path, text: str):
    file = tmp_path / "profile.json"
    file.write_text(text)
    assert _read(file) is None


def test_a_profile_is_read(tmp_path: Path):
    file = tmp_path / "profile.json"
    file.write_text('{"points": [[1, 0.01], [8, 0.02]]}')
    assert _read(file) == [(1.0, 0.01), (8.0, 0.02)]


def test_what_a_tiny_engine_has_measured_is_not_kept_for_others():
    config = CONFIGS["experts"]
    weights = load_weights(RandomCheckpoint(config), torch.float32, torch.device("cpu"))
    decoder = TorchDecoder(config, weights)

    def key(length: int | None, memory: int) -> str:
        sizes = EngineConfig(max_model_len=length, kv_cache_memory_bytes=memory)
        return engine_key(EngineCore(decoder, Vocabulary(config.vocab_size), EngineParts(sizes)))

    usual = key(None, 1 << 24)
    assert key(None, 1 << 25) == usual
    assert len({usual, key(8, 1 << 24), key(None, 1 << 15)}) == 3
