"""GGUF of models with recurrent layers: hostile metadata, missing tensors and sizes, and families that share a name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.backends.weight_loader import check_names
from foreword.errors import CheckpointError
from foreword.models.formats.gguf.checkpoint import GgufCheckpoint
from foreword.models.formats.gguf.file import GgufFile
from helpers.changed_gguf import opened
from helpers.hybrid_gguf import CASES, write_hybrid_gguf
from helpers.tiny_families import make_family

NAMES = {
    "qwen3_next": "qwen3next",
    "qwen3_next, older": "qwen3next",
    "qwen3_5": "qwen35",
    "granite_hybrid": "granitehybrid",
    "granite_dense": "granitehybrid",
    "bamba": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "nemotron_h, experts": "nemotron_h_moe",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for case in NAMES:
        family, settings, arguments = CASES[case]
        root = tmp_path_factory.mktemp("model")
        directory, _ = make_family(root / "hf", family, **settings)
        found[case] = write_hybrid_gguf(directory, root / "model.gguf", **arguments)
    return found


_SIZES = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
_COMMON = (
    *(f"ssm.{size}" for size in _SIZES),
    "attention.head_count_kv",
    "block_count",
    "rope.dimension_count",
)
KEYS = {
    "qwen3_next": ("full_attention_interval", "expert_shared_feed_forward_length", "expert_count"),
    "qwen3_5": ("full_attention_interval", "attention.recurrent_layers", "nextn_predict_layers"),
    "granite_dense": ("attention.scale", "rope.scaling.finetuned", "expert_shared_feed_forward_length"),
    "bamba": ("rope.scaling.finetuned",),
    "nemotron_h": ("feed_forward_length",),
    "nemotron_h, experts": ("feed_forward_length", "expert_feed_forward_length", "nextn_predict_layers"),
}
PLACES = [(case, key) for case, keys in KEYS.items() for key in (*_COMMON, *keys)]
VALUES: list[Any] = [
    -1,
    0,
    3,
    2**40,
    2**31 - 1,
    True,
    "many",
    [1, 2],
    [0] * 5,
    ["a"] * 5,
    1.5,
    float("nan"),
    ...,
]


def read_all(checkpoint: GgufCheckpoint) -> None:
    """What a backend does with a file: its names, then every tensor."""
    check_names(checkpoint)
    for name in checkpoint.tensor_names():
        checkpoint.load(name, torch.float32)
        checkpoint.quantized(name)


@pytest.mark.parametrize(("case", "key"), PLACES)
def test_a_hostile_value_is_one_clear_line_or_harmless(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], case: str, key: str
):
    for value in VALUES:

        def change(file: GgufFile, value: Any = value) -> None:
            file.metadata.pop(f"{NAMES[case]}.{key}", None)
            if value is not ...:
                file.metadata[f"{NAMES[case]}.{key}"] = value

        try:
            checkpoint = opened(monkeypatch, files[case], change)
            read_all(checkpoint)
        except CheckpointError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 400
        else:  # a number that could be meant: what it describes is not larger than the file
            assert len(checkpoint.config.layers) <= 5


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_next, older", "qwen3_5", "nemotron_h, experts"])
def test_a_missing_tensor_is_named(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], case: str):
    names = [name for name in GgufFile(files[case]).tensors if name.startswith("blk.0.")]
    assert {"blk.0.ssm_a", "blk.0.ssm_dt.bias", "blk.0.ssm_conv1d.weight"} <= set(names)
    for name in names:
        checkpoint = opened(monkeypatch, files[case], lambda file, name=name: file.tensors.pop(name))
        with pytest.raises(CheckpointError, match=r"lacks tensor model\.layers\.0\."):
            check_names(checkpoint)


@pytest.mark.parametrize("size", _SIZES)
def test_a_missing_size_is_named_as_the_file_would(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], size: str
):
    for case, name in NAMES.items():
        with pytest.raises(CheckpointError, match=rf"{name}\.ssm\.{size} is missing"):
            opened(monkeypatch, files[case], lambda file, key=f"{name}.ssm.{size}": file.metadata.pop(key))


def test_more_layers_than_tensors_are_refused_before_lists_are_made(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]
):
    for case, name in NAMES.items():
        with pytest.raises(CheckpointError, match=r"layers have no tensors|belongs to no supported model"):
            opened(
                monkeypatch,
                files[case],
                lambda file, key=f"{name}.block_count": file.metadata.update({key: 2**31 - 1}),
            )


def test_rates_that_would_grow_a_state_are_refused(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]):
    def change(file: GgufFile) -> None:
        kept = file.rows
        file.rows = lambda name: kept(name) * 0 if name.endswith("ssm_a") else kept(name)  # type: ignore[method-assign]

    checkpoint = opened(monkeypatch, files["qwen3_5"], change)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_a has rates that are not below 0"):
        checkpoint.load("model.layers.0.linear_attn.A_log", torch.float32)


def test_layers_differ_in_no_size(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]):
    def change(file: GgufFile) -> None:
        file.metadata["nemotron_h.feed_forward_length"] = [0, 48, 0, 0, 40]

    with pytest.raises(CheckpointError, match=r"feed_forward_length of 40 in some layers and 48 in others"):
        opened(monkeypatch, files["nemotron_h"], change)


def test_a_list_of_recurrent_layers_goes_before_the_period(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]
):
    def change(file: GgufFile) -> None:
        file.metadata["qwen35.full_attention_interval"] = 3
        file.metadata["qwen35.attention.recurrent_layers"] = [True, False, True, False, False]

    plain = GgufCheckpoint(files["qwen3_5"])
    assert opened(monkeypatch, files["qwen3_5"], change).config == plain.config


def test_granite_is_told_from_bamba_by_its_factors_and_rotated_unless_its_file_denies_it(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]
):
    found = {case: GgufCheckpoint(files[case]).config for case in ("granite_dense", "bamba")}
    assert [config.architecture for config in found.values()] == ["granitemoehybrid", "bamba"]
    rotated = [{layer.attention.is_rotated for layer in config.layers} for config in found.values()]
    assert rotated == [{False}, {True}]

    def change(file: GgufFile) -> None:
        del file.metadata["granitehybrid.rope.scaling.finetuned"]

    config = opened(monkeypatch, files["granite_dense"], change).config
    assert {layer.attention.is_rotated for layer in config.layers} == {True}
