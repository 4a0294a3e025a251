"""Models of no family that is known, and tensors that belong to no decoder."""

from pathlib import Path
from typing import Any

import pytest

from foreword.errors import CheckpointError
from foreword.models.formats.hf.checkpoint import without_draft_modules
from foreword.models.formats.hf.config import hf_config

PATH = Path("config.json")


@pytest.mark.parametrize(
    ("hf_class", "more", "words"),
    [
        ("FalconH1ForCausalLM", {}, "recurrent layers"),
        ("NovelForCausalLM", {"layer_types": ["linear_attention"]}, "recurrent layers"),
        ("MambaForCausalLM", {}, "recurrent layers"),
        ("Olmo3ForCausalLM", {"sliding_window": 4096}, "Olmo2ForCausalLM, which lacks a sliding window"),
        (
            "Qwen3VLForConditionalGeneration",
            {"vision_config": {"a": 1}},
            "Qwen3ForCausalLM, which lacks images",
        ),
        ("Dots1ForCausalLM", {}, "nearest supported one is"),
        ("X" * 5000, {}, "nearest"),
    ],
)
def test_an_unknown_architecture_hears_of_the_nearest(hf_class: str, more: dict[str, Any], words: str):
    with pytest.raises(CheckpointError, match=words) as caught:
        hf_config(more | {"architectures": [hf_class]}, frozenset(), PATH)
    assert len(str(caught.value)) < 400


def test_modules_that_guess_ahead_are_left_out_whatever_their_number_is():
    names = [
        "model.layers.3.x",
        "model.layers.4.eh_proj.weight",
        "model.layers.77.x",
        "mtp.fc.weight",
        "model.norm.weight",
    ]
    files = dict.fromkeys(names, PATH)
    kept = without_draft_modules(files, {"num_hidden_layers": 4, "num_nextn_predict_layers": 1})
    assert list(kept) == ["model.layers.3.x", "model.layers.77.x", "model.norm.weight"]
    huge = without_draft_modules(files, {"num_hidden_layers": 4, "num_nextn_predict_layers": 10**12})
    assert list(huge) == ["model.layers.3.x", "model.norm.weight"]
