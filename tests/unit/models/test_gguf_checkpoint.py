import json
import math

import gguf
import numpy as np
import pytest
import torch

from foreword.errors import CheckpointError
from foreword.models.config import FrequencyFactors, LinearRopeScaling, YarnRopeScaling
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.formats.gguf import checkpoint
from helpers.tiny_gguf import llama3_factors
from helpers.tiny_models import make_hf_model, write_gguf

ARCHITECTURES = ["llama", "llama3", "mistral", "qwen2", "qwen3"]
BLOCK_QUANTS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.fixture(scope="module")
def hf_models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_hf_model(root / name, name, tied=name in ("llama3", "qwen3"), seed=3)
        for name in ARCHITECTURES
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gguf_holds_the_same_model_as_its_directory(hf_models, tmp_path, architecture):
    directory = open_checkpoint(hf_models[architecture])
    file = open_checkpoint(write_gguf(hf_models[architecture], tmp_path / "model.gguf"))
    assert file.tensor_names() == directory.tensor_names()
    for name in directory.tensor_names():
        assert torch.equal(file.load(name, torch.float32), directory.load(name, torch.float32)), name
    assert file.quantized("model.embed_tokens.weight") is None
    for field in ("vocab_size", "hidden_size", "context_length", "layers", "tied_embeddings"):
        assert getattr(file.config, field) == getattr(directory.config, field)
    assert file.config.rope.theta == directory.config.rope.theta
    assert file.config.norm.eps == pytest.approx(directory.config.norm.eps)


def test_biases_of_a_llama_are_put_back_in_order(tmp_path):
    source = make_hf_model(
        tmp_path / "hf", "llama", tied=False, attention_bias=True, mlp_bias=True, hidden_size=96,
        num_attention_heads=3, num_key_value_heads=1, head_dim=20,
    )  # fmt: skip
    directory = open_checkpoint(source)
    file = open_checkpoint(write_gguf(source, tmp_path / "model.gguf"))
    assert file.config.layer.attention.bias
    assert file.config.layer.attention.output_bias
    assert file.config.layer.mlp.bias
    name = "model.layers.1.self_attn.q_proj.bias"
    assert torch.equal(file.load(name, torch.float32), directory.load(name, torch.float32))


@pytest.mark.parametrize("quant", [*BLOCK_QUANTS, "F16", "BF16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_dequantised_weights_are_the_reference_packages(hf_models, tmp_path, architecture, quant):
    directory = open_checkpoint(hf_models[architecture])
    file = open_checkpoint(write_gguf(hf_models[architecture], tmp_path / "model.gguf", quant))
    kind = gguf.GGMLQuantizationType[quant]
    for name in directory.tensor_names():
        weight = directory.load(name, torch.float32).numpy()
        if weight.ndim == 2:  # blocks lie inside rows, so permuting rows and quantising commute
            weight = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        assert np.array_equal(file.load(name, torch.float32).numpy(), weight), name


@pytest.mark.parametrize("quant", BLOCK_QUANTS)
def test_quantised_rows_match_the_loaded_tensor(hf_models, tmp_path, quant):
    file = open_checkpoint(write_gguf(hf_models["llama"], tmp_path / "model.gguf", quant))
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        name = f"model.layers.0.{part}.weight"
        stored = file.quantized(name)
        assert stored is not None
        assert stored.kind == quant
        assert stored.data.dtype == np.uint8
        assert stored.data.shape[0] == stored.shape[0]
        values = gguf.quants.dequantize(np.ascontiguousarray(stored.data), gguf.GGMLQuantizationType[quant])
        assert values.shape == stored.shape
        assert torch.equal(torch.from_numpy(values), file.load(name, torch.float32))
    assert file.quantized("model.norm.weight") is None


def test_blocks_are_not_copied_where_the_order_is_right(hf_models, tmp_path):
    file = open_checkpoint(write_gguf(hf_models["llama"], tmp_path / "model.gguf", "Q4_1"))
    first, again = (file.quantized("model.embed_tokens.weight") for _ in range(2))
    assert first is not None
    assert again is not None
    assert np.shares_memory(first.data, again.data)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_read(tmp_path, kind):
    source = make_hf_model(tmp_path / "hf", "qwen2", tied=True, hidden_size=256, intermediate_size=256)
    path = _rewrite_embedding(write_gguf(source, tmp_path / "plain.gguf"), tmp_path / "model.gguf", kind)
    file = open_checkpoint(path)
    stored = file.quantized("model.embed_tokens.weight")
    assert stored is not None
    assert stored.kind == kind
    loaded = file.load("model.embed_tokens.weight", torch.float32)
    assert loaded.shape == (360, 256)
    assert np.array_equal(
        loaded.numpy(), gguf.quants.dequantize(stored.data, gguf.GGMLQuantizationType[kind]), equal_nan=True
    )


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "Q5_K", "Q6_K"])
def test_kernels_and_numpy_dequantise_alike(monkeypatch, kind, has_kernels):
    if not has_kernels:
        monkeypatch.setattr(checkpoint, "_native_kinds", lambda: ())
    quant = gguf.GGMLQuantizationType[kind]
    rows = np.random.default_rng(1).integers(0, 60, (3, 2 * gguf.GGML_QUANT_SIZES[quant][1]), dtype=np.uint8)
    found = checkpoint.dequantized(kind, rows, torch.float32)
    assert torch.equal(found, torch.from_numpy(gguf.quants.dequantize(rows, quant)))


def _rewrite_embedding(source, target, kind):
    """A copy of a GGUF file whose embedding is made of random blocks of `kind`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen2")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    quant = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            row_bytes = gguf.quants.quant_shape_to_byte_shape((360, 256), quant)[1]
            blocks = np.random.default_rng(0).integers(0, 60, (360, row_bytes), dtype=np.uint8)
            writer.add_tensor(tensor.name, blocks, raw_dtype=quant)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_llama3_scaling_is_carried_as_factors(hf_models, tmp_path):
    file = open_checkpoint(write_gguf(hf_models["llama3"], tmp_path / "model.gguf"))
    config = json.loads((hf_models["llama3"] / "config.json").read_text())
    assert isinstance(file.config.rope.scaling, FrequencyFactors)
    assert file.config.rope.scaling.factors == pytest.approx(llama3_factors(config))
    assert not any("rope_freqs" in name for name in file.tensor_names())


def test_linear_scaling(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
    source = make_hf_model(tmp_path / "hf", "llama", rope_parameters=rope)
    assert open_checkpoint(source).config.rope.scaling == LinearRopeScaling(2.5)
    file = open_checkpoint(write_gguf(source, tmp_path / "model.gguf"))
    assert file.config.rope.scaling == LinearRopeScaling(2.5)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama__rope__scale_linear": 4.0}, LinearRopeScaling(4.0)),
        ({"llama__rope__scaling__factor": 2.0}, LinearRopeScaling(2.0)),
        ({"llama__rope__scaling__factor": 2.0, "llama__rope__scale_linear": 4.0}, LinearRopeScaling(2.0)),
        ({"llama__rope__scaling__factor": 2.0, "llama__rope__scaling__type": "none"}, None),
        ({"llama__rope__scale_linear": 1.0}, None),
        ({"llama__rope__scaling__type": "linear"}, LinearRopeScaling(1.0)),
    ],
)
def test_a_scaling_factor_without_a_kind_is_linear(hf_models, tmp_path, metadata, expected):
    path = write_gguf(hf_models["llama"], tmp_path / "model.gguf", **metadata)
    assert open_checkpoint(path).config.rope.scaling == expected


YARN = {
    "llama__rope__scaling__type": "yarn",
    "llama__rope__scaling__factor": 4.0,
    "llama__rope__scaling__original_context_length": 512,
}


def test_yarn_is_read_as_from_config_json(hf_models, tmp_path):
    config = open_checkpoint(write_gguf(hf_models["llama"], tmp_path / "model.gguf", **YARN)).config
    assert config.rope.scaling == YarnRopeScaling(4.0, 512)
    assert config.rope.magnitude == pytest.approx(0.1 * math.log(4.0) + 1)
    assert config.context_length == 2048


def test_a_sliding_window_caps_no_context(hf_models, tmp_path):
    path = write_gguf(hf_models["mistral"], tmp_path / "model.gguf", llama__attention__sliding_window=128)
    config = open_checkpoint(path).config
    assert (config.context_length, config.layer.attention.window) == (512, 128)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general__architecture": "gemma"}, ["gemma", "llama"]),
        ({"llama__rope__scaling__type": "yarn"}, ["factor"]),
        ({"llama__rope__scaling__type": "longrope"}, ["longrope"]),
        (YARN | {"llama__rope__scaling__yarn_log_multiplier": 0.1}, ["yarn_log_multiplier"]),
        ({"llama__nextn_predict_layers": 2}, ["nextn_predict_layers", "layers"]),
        ({"llama__nextn_predict_layers": "many"}, ["nextn_predict_layers"]),
        ({"llama__expert_count": 8}, ["expert_used_count"]),
        ({"llama__rope__dimension_count": 8}, ["part of each head"]),
        ({"llama__attention__head_count": 3}, ["heads"]),
        ({"llama__block_count": 1_000_000_000}, ["layers"]),
        ({"llama__block_count": 1}, ["layers"]),
        ({"llama__embedding_length": 0}, ["embedding_length"]),
        ({"llama__context_length": "long"}, ["context_length"]),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, ["epsilon"]),
        ({"split__count": 2}, ["split"]),
        ({"general__alignment": 3}, ["alignment"]),
    ],
)
def test_unsupported_or_damaged_metadata_is_refused(hf_models, tmp_path, metadata, words):
    path = write_gguf(hf_models["llama"], tmp_path / "model.gguf", **metadata)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_unsupported_tensor_type_is_named(hf_models, tmp_path):
    path = write_gguf(hf_models["llama"], tmp_path / "model.gguf")
    raw = bytearray(path.read_bytes())
    name = b"blk.1.ffn_down.weight"
    type_at = raw.index(name) + len(name) + 4 + 2 * 8
    raw[type_at : type_at + 4] = int(gguf.GGMLQuantizationType.Q2_K).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight.*Q2_K"):
        open_checkpoint(path)


def test_a_missing_tensor_is_named(hf_models, tmp_path):
    file = open_checkpoint(write_gguf(hf_models["llama3"], tmp_path / "model.gguf"))
    for ask in (lambda: file.load("lm_head.weight", torch.float32), lambda: file.quantized("lm_head.weight")):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            ask()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_in_the_asked_type(hf_models, tmp_path, dtype):
    file = open_checkpoint(write_gguf(hf_models["qwen2"], tmp_path / "model.gguf", "Q8_0"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(file.load(name, dtype), file.load(name, torch.float32).to(dtype))
