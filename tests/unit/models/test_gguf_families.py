"""GGUF of mixtures and of latent attention: hostile metadata, and tensors that do not fit together."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.errors import CheckpointError
from foreword.models.formats.gguf.checkpoint import GgufCheckpoint
from foreword.models.formats.gguf.file import GgufFile
from helpers.changed_gguf import opened
from helpers.family_gguf import write_family_gguf
from helpers.tiny_families import YARN, make_family

YARN_ALIKE = YARN | {"mscale": 0.9, "mscale_all_dim": 0.9}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, changes in (("deepseek_v3", {"rope_parameters": YARN_ALIKE}), ("glm4_moe", {})):
        root = tmp_path_factory.mktemp(name)
        directory, _ = make_family(root / "hf", name, **changes)
        found[name] = write_family_gguf(name, directory, root / "model.gguf")
    return found


KEYS = {
    "deepseek_v3": """expert_count expert_used_count expert_shared_count expert_group_count expert_group_used_count
        expert_weights_norm expert_weights_scale expert_gating_func expert_feed_forward_length block_count
        leading_dense_block_count nextn_predict_layers attention.q_lora_rank attention.kv_lora_rank
        attention.key_length attention.key_length_mla attention.value_length_mla rope.dimension_count
        rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
        rope.scaling.yarn_log_multiplier rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow""",
    "glm4_moe": """expert_count expert_gating_func nextn_predict_layers leading_dense_block_count block_count
        rope.dimension_count attention.key_length expert_weights_norm expert_shared_count""",
}
PLACES = [(family, key) for family, keys in KEYS.items() for key in keys.split()]


@pytest.mark.parametrize(("number", "name"), [(15, "Q4_K_M"), (0, "F32"), (99999, ""), ("x", ""), (None, "")])
def test_the_quantisation_has_its_usual_name(monkeypatch, files: dict[str, Path], number: object, name: str):
    def change(file: GgufFile) -> None:
        file.metadata["general.file_type"] = number

    assert opened(monkeypatch, files["glm4_moe"], change).weight_format() == name


@pytest.mark.parametrize(("family", "key"), PLACES)
def test_a_hostile_value_is_one_clear_line_or_harmless(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], family: str, key: str
):
    prefix = {"deepseek_v3": "deepseek2", "glm4_moe": "glm4moe"}[family]
    for value in (-1, 0, 2**40, True, "many", [1, 2], 1.5, float("nan"), ...):

        def change(file: GgufFile, value: Any = value) -> None:
            file.metadata.pop(f"{prefix}.{key}", None)
            if value is not ...:
                file.metadata[f"{prefix}.{key}"] = value

        try:
            checkpoint = opened(monkeypatch, files[family], change)
        except CheckpointError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 400
        else:  # a number that could be meant: what it describes is not larger than the file
            assert len(checkpoint.config.layers) <= 3


def test_both_parts_of_what_expands_latent_rows_must_fit(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]
):
    def change(file: GgufFile) -> None:
        stored = file.tensors["blk.0.attn_k_b.weight"]
        heads, rank, nope = stored.shape
        file.tensors[stored.name] = replace(stored, shape=(rank, heads, nope))

    checkpoint = opened(monkeypatch, files["deepseek_v3"], change)
    with pytest.raises(CheckpointError, match=r"attn_k_b\.weight and blk\.0\.attn_v_b\.weight do not fit"):
        checkpoint.load("model.layers.0.self_attn.kv_b_proj.weight", torch.float32)


def test_gate_and_up_of_all_experts_may_be_one_tensor(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]
):
    plain = GgufCheckpoint(files["glm4_moe"])
    expert = "model.layers.1.mlp.experts.2."
    gate, up = (plain.load(f"{expert}{name}_proj.weight", torch.float32) for name in ("gate", "up"))
    others = torch.zeros(len(gate), gate.shape[1])
    fused = torch.cat((others, others, others, others, gate, up, *[others] * 6))

    def change(file: GgufFile) -> None:
        stored = file.tensors.pop("blk.1.ffn_gate_exps.weight")
        file.tensors.pop("blk.1.ffn_up_exps.weight")
        both = "blk.1.ffn_gate_up_exps.weight"
        shape = (stored.shape[0], 2 * stored.shape[1], stored.shape[2])
        file.tensors[both] = replace(stored, name=both, shape=shape)
        kept = file.rows
        file.rows = lambda name: fused.numpy().view("uint8") if name == both else kept(name)  # type: ignore[method-assign]

    checkpoint = opened(monkeypatch, files["glm4_moe"], change)
    assert checkpoint.tensor_names() == plain.tensor_names()
    for name, expected in (("gate", gate), ("up", up)):
        found = checkpoint.load(f"model.layers.1.mlp.experts.2.{name}_proj.weight", torch.float32)
        assert torch.equal(found, expected)
