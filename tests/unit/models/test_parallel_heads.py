"""Files of heads that guess many places at once: what they are found to be, and what is refused in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foreword.errors import ForewordError
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec
from foreword.models.heads.describe import describe_head
from foreword.models.heads.opening import open_head
from foreword.models.heads.writing import convert_head, quantize_head
from helpers.tiny_heads import HIDDEN, TinyHead

VOCAB = 90
LAYER = LayerSpec(AttentionSpec(4, 2, 16), MlpSpec(96))
TARGET = ModelConfig("llama", VOCAB, HIDDEN, 512, (LAYER,) * 8, NormSpec(1e-5), RopeSpec(10000.0), True)


def test_medusa_heads_are_converted_to_vllm_s_layout(tmp_path: Path):
    """With what vLLM has to be told, and without the model that a Medusa-2 file also holds."""
    head = TinyHead(VOCAB).medusa(3)
    head.tensors["model.norm.weight"] = torch.ones(HIDDEN)
    path = head.save(
        tmp_path / "head", {"0.": "medusa_head.0.", "1.": "medusa_head.1.", "2.": "medusa_head.2."}
    )
    convert_head(path, tmp_path / "converted")
    before, after = open_head(path), open_head(tmp_path / "converted")
    assert after.spec == before.spec
    assert (after.spec.num_heads, after.spec.blocks_per_head) == (3, 1)
    assert after.files.config["medusa_fc_bias"] is True
    assert "lm_heads.2.weight" in load_file(tmp_path / "converted" / "model.safetensors")
    shown = describe_head(after)
    assert (shown["method"], shown["guesses_at_once"], shown["layers"], shown["borrows"]) == (
        "medusa",
        3,
        0,
        [],
    )
    quantize_head(before, tmp_path / "small")
    assert open_head(tmp_path / "small").spec.shapes == before.spec.shapes


def test_heads_that_guess_at_once_are_shown_and_converted(tmp_path: Path):
    block = {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2, 4]}, "block_size": 7}
    masks = {"draft_vocab_size": 40, "pard_token": 5}
    paths = {
        "dflash": TinyHead(VOCAB, qk_norm=True).dflash().save(tmp_path / "dflash", **block),
        "p_eagle": TinyHead(VOCAB, draft_vocab=40).p_eagle().save(tmp_path / "p_eagle", **masks),
    }
    for method, path in paths.items():
        shown = describe_head(open_head(path))
        assert (shown["method"], shown["mask_token"]) == (method, 5)
        convert_head(path, tmp_path / "converted" / method)
        assert open_head(tmp_path / "converted" / method).spec == open_head(path).spec
    assert describe_head(open_head(paths["dflash"]))["guesses_at_once"] == 6


def refused(write: Callable[[Path], Path], message: str, path: Path) -> None:
    with pytest.raises(ForewordError, match=message) as caught:
        open_head(write(path)).fitted(TARGET)
    assert "\n" not in str(caught.value)


def dflash(**config: Any) -> Callable[[Path], Path]:
    given: dict[str, Any] = {"mask_token_id": 5, "block_size": 7, "target_layer_ids": [0, 2, 4], **config}
    return lambda path: TinyHead(VOCAB).dflash().save(path, **given)


def medusa(change: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        head = TinyHead(VOCAB).medusa(3)
        change(head.tensors)
        return head.save(path, **config)

    return write


WINDOWED = {"layer_types": ["sliding_attention"], "sliding_window": 20}


@pytest.mark.parametrize(
    ("more", "window", "is_causal"),
    [
        ({}, None, False),
        ({"sliding_window": 20}, None, False),  # a copy of the target's config
        ({"sliding_window": 20, "use_sliding_window": True}, 20, True),
        (WINDOWED, 20, True),
        (WINDOWED | {"is_causal": False}, 20, False),
        (WINDOWED | {"speculators_model_type": "dflash"}, 20, False),
        (WINDOWED | {"speculators_model_type": "dflash", "sliding_window_non_causal": False}, 20, True),
        ({"layer_types": ["full_attention"], "sliding_window": 20}, None, False),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 9, "causal": False}}, 9, False),
        ({"is_causal": False, "dflash_config": {"causal": True}}, None, False),
        ({"dflash_config": {"causal_head": True}}, None, True),  # JetSpec
    ],
)
def test_the_window_and_causality_of_a_block_head(
    tmp_path: Path, more: dict[str, Any], window: int | None, is_causal: bool
):
    block = {"mask_token_id": 5, "target_layer_ids": [0, 2, 4]} | more.get("dflash_config", {})
    path = TinyHead(VOCAB).dflash().save(tmp_path, **more | {"dflash_config": block}, block_size=7)
    spec = open_head(path).spec
    assert (spec.window, spec.is_causal) == (window, is_causal)
    assert describe_head(open_head(path)).get("window") == window


def test_a_head_with_full_and_sliding_attention_is_refused(tmp_path: Path):
    kinds = ["full_attention", "sliding_attention"]
    path = TinyHead(VOCAB, layers=2).eagle3().save(tmp_path, layer_types=kinds, sliding_window=20)
    with pytest.raises(ForewordError, match="a head with full and sliding attention"):
        open_head(path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (dflash(mask_token_id=None), "mask_token_id is missing"),
        (dflash(mask_token_id=VOCAB), "mask_token_id is 90, not a token id in 0"),
        (dflash(block_size=1), "a block of 1"),
        (dflash(block_size=65), "a block of 65"),
        (dflash(target_layer_ids=[1, 2]), "reads 3 hidden states"),
        (dflash(target_layer_ids=[1, 2, 8]), "after layer 9 and it has 8"),
        (dflash(layer_types=["sliding_attention"]), "sliding_window is missing"),
        (dflash(layer_types="sliding_attention"), "layer_types is 'sliding_attention', not a list of 1"),
        (dflash(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (medusa(lambda t: t.pop("1.0.linear.weight")), r"lacks tensor blocks\.1\.layers\.0\.weight"),
        (medusa(lambda t: t.pop("1.1.weight")), r"lacks tensor lm_heads\.1\.weight"),
        (medusa(lambda t: t.update({"1.1.weight": torch.ones(5, HIDDEN)})), r"has shape \(5, 64\)"),
        (
            medusa(lambda t: t.update(token_map=torch.zeros(VOCAB).long()), vocab_size=VOCAB),
            "the same id",
        ),
        (lambda path: TinyHead(80).medusa(3).save(path), "vocabulary of 80 and this model's is 90"),
    ],
)
def test_heads_that_guess_at_once_and_do_not_fit(tmp_path: Path, write: Callable[[Path], Path], message: str):
    refused(write, message, tmp_path / "head")
