"""PEFT's files: what fits is read, what does not is refused in one line that says why."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.adapters import CONFIG_FILE, TENSOR_FILE, open_adapter
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.heads.files import HeadFiles
from helpers.adapters import ADAPTED, ALL, adapter_tensors, write_adapter

PREFIX = "base_model.model.model.layers.0."
Q_A, Q_B = PREFIX + "self_attn.q_proj.lora_A.weight", PREFIX + "self_attn.q_proj.lora_B.weight"


def test_factors_are_scaled_as_peft_does(tmp_path: Path):
    tensors = adapter_tensors(8, ALL)
    plain = open_adapter(write_adapter(tmp_path / "a", 8, lora_alpha=24), ADAPTED)
    rooted = open_adapter(write_adapter(tmp_path / "b", 8, lora_alpha=24, use_rslora=True), ADAPTED)
    place = (0, "self_attn.q_proj")
    torch.testing.assert_close(plain.factors[place].up, 3.0 * tensors[Q_B])
    torch.testing.assert_close(rooted.factors[place].up, 24 / math.sqrt(8) * tensors[Q_B])
    torch.testing.assert_close(plain.factors[place].down, tensors[Q_A])
    assert (plain.rank, len(plain.factors)) == (8, 14)


def test_ranks_and_alphas_of_single_modules_are_peft_s_patterns(tmp_path: Path):
    tensors = adapter_tensors(4, ["q_proj", "v_proj"]) | {
        name: tensor for name, tensor in adapter_tensors(2, ["v_proj"]).items() if ".1." in name
    }
    settings: dict[str, Any] = {
        "rank_pattern": {r"layers\.1\.self_attn\.v_proj": 2},
        "alpha_pattern": {"v_proj": 6},
    }
    path = write_adapter(tmp_path / "a", 4, ["q_proj", "v_proj"], tensors=tensors, **settings)
    found = open_adapter(path, ADAPTED).factors
    assert [found[layer, "self_attn.v_proj"].rank for layer in (0, 1)] == [4, 2]
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    torch.testing.assert_close(found[1, "self_attn.v_proj"].up, 3.0 * tensors[name])


def test_numbers_of_half_width_and_chosen_layers_are_read(tmp_path: Path):
    tensors = {n: t.bfloat16() for n, t in adapter_tensors(4, ["q_proj"]).items() if ".1." in n}
    path = write_adapter(tmp_path / "a", 4, ["q_proj"], tensors=tensors, layers_to_transform=[1])
    assert list(open_adapter(path, ADAPTED).factors) == [(1, "self_attn.q_proj")]


def changed(**tensors: Tensor | None) -> Callable[[], dict[str, Tensor]]:
    """The tensors of a good adapter with some replaced, or left out."""
    names = {"q_a": Q_A, "q_b": Q_B}

    def make() -> dict[str, Tensor]:
        found = adapter_tensors(4, ["q_proj"])
        for key, tensor in tensors.items():
            if tensor is None:
                del found[names[key]]
            else:
                found[names.get(key, key)] = tensor
        return found

    return make


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        (changed(q_b=None), r"lora_B of layers\.0\.self_attn\.q_proj is missing"),
        (changed(q_a=None, q_b=None), r"lora_A of layers\.0\.self_attn\.q_proj is missing"),
        (changed(q_a=torch.ones(4, 95)), r"lora_A has shape \(4, 95\), and \(4, 96\) fits the model"),
        (changed(q_b=torch.ones(120, 3)), r"lora_B has shape \(120, 3\), and \(120, 4\) fits the model"),
        (changed(q_a=torch.ones(96)), r"lora_A has shape \(96,\)"),
        (changed(q_a=torch.full((4, 96), math.nan)), "lora_A holds no finite floats"),
        (changed(q_a=torch.ones(4, 96, dtype=torch.int8)), "lora_A holds no finite floats"),
        (
            changed(q_a=torch.ones(2, 96), q_b=torch.ones(120, 2)),
            "have rank 2, and adapter_config.json says 4",
        ),
        (changed(**{PREFIX + "self_attn.q_proj.lora_magnitude_vector": torch.ones(3)}), "belongs to DoRA"),
        (changed(**{"base_model.model.lm_head.lora_A.weight": torch.ones(3)}), "adapts embeddings"),
        (
            changed(**{PREFIX + "mlp.router.lora_A.weight": torch.ones(3)}),
            "mlp.router.lora_A.weight is not supported",
        ),
        (changed(**{Q_A.replace(".0.", ".7."): torch.ones(4, 96)}), "is for layer 7, and the model has 2"),
    ],
)
def test_bad_tensors_are_named(tensors: Callable[[], dict[str, Tensor]], complaint: str, tmp_path: Path):
    path = write_adapter(tmp_path / "a", 4, ["q_proj"], tensors=tensors())
    with pytest.raises(CheckpointError, match=complaint) as refusal:
        open_adapter(path, ADAPTED)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"peft_type": "IA3"}, "type 'IA3' is not supported"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"whole modules \(modules_to_save\) is not supported"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"adapted embeddings \(embed_tokens\)"),
        ({"rank_pattern": ["x"]}, "rank_pattern must map modules to numbers"),
        ({"rank_pattern": {"(.*.*)*zz": 8}}, "is not the name of a module"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern of q_proj must be a positive number"),
        ({"layers_to_transform": ["a"]}, "layers_to_transform must be numbers of layers"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a positive number"),
        ({"target_modules": ["q_proj", "wq"]}, "unknown target module 'wq'; known are q_proj, k_proj"),
        ({"bias": "all"}, "trained biases are not supported"),
        ({"fan_in_fan_out": True}, "transposed matrices"),
        ({"lora_bias": True}, r"biases of the factors \(lora_bias\) is not supported"),
        ({"use_rslora": "false"}, "use_rslora must be true or false, not 'false'"),
        ({"target_modules": [1]}, r"target_modules must be names of modules, not \[1\]"),
        ({"target_modules": {"q_proj": 1}}, "target_modules must be names of modules, not {'q_proj': 1}"),
        ({"r": 0}, "r must be a positive number, not 0"),
        ({"lora_alpha": "16"}, "lora_alpha must be a positive number, not '16'"),
        (
            {"target_modules": ["q_proj", "k_proj"]},
            "names k_proj in target_modules, and .* has no tensor for it",
        ),
        ({"layers_to_transform": [0, 1, 7]}, "layers_to_transform names layer 7, and the model has 2"),
    ],
)
def test_what_no_backend_does_is_refused_by_name(settings: dict[str, Any], complaint: str, tmp_path: Path):
    path = write_adapter(tmp_path / "a", 4, ["q_proj"], **settings)
    if "target_modules" in settings:
        (path / CONFIG_FILE).write_text((path / CONFIG_FILE).read_text())
    with pytest.raises(CheckpointError, match=complaint):
        open_adapter(path, ADAPTED)


def test_an_adapter_of_another_model_is_told_as_such_and_not_as_incomplete(tmp_path: Path):
    first = {name: tensor for name, tensor in adapter_tensors(4, ["q_proj"]).items() if ".0." in name}
    path = write_adapter(tmp_path / "short", 4, ["q_proj"], tensors=first)
    with pytest.raises(CheckpointError, match=r"ends before layer 1 .* an adapter of another model"):
        open_adapter(path, ADAPTED)
    wide = first | {Q_A: torch.ones(4, 95)}
    path = write_adapter(tmp_path / "wide", 4, ["q_proj", "k_proj"], tensors=wide)
    with pytest.raises(CheckpointError, match=r"has shape \(4, 95\).* an adapter of another model"):
        open_adapter(path, ADAPTED)


def test_an_adapter_in_place_of_a_model_and_the_reverse_are_told_by_name(tmp_path: Path):
    path = write_adapter(tmp_path / "a", 4, ["q_proj"])
    with pytest.raises(CheckpointError, match="holds a LoRA adapter, which is not a whole model"):
        open_checkpoint(path)
    (path / CONFIG_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"is missing; give a directory that holds a LoRA adapter \("):
        open_adapter(path, ADAPTED)
    with pytest.raises(CheckpointError, match="holds a draft head"):
        HeadFiles(path)


def test_a_rank_above_128_is_refused(tmp_path: Path):
    path = write_adapter(tmp_path / "a", 129, ["q_proj"])
    with pytest.raises(CheckpointError, match="rank 129 is not supported; the most is 128"):
        open_adapter(path, ADAPTED)


def test_files_that_are_not_there_or_not_whole_are_told_in_one_line(tmp_path: Path):
    with pytest.raises(CheckpointError, match="is not a directory"):
        open_adapter(tmp_path / "nowhere", ADAPTED)
    path = write_adapter(tmp_path / "a")
    (path / TENSOR_FILE).write_bytes((path / TENSOR_FILE).read_bytes()[:100])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        open_adapter(path, ADAPTED)
    (path / TENSOR_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing"):
        open_adapter(path, ADAPTED)
    (path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickled adapter, which can run code"):
        open_adapter(path, ADAPTED)
    (path / CONFIG_FILE).write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        open_adapter(path, ADAPTED)
