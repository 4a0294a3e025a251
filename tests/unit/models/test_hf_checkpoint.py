import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.errors import CheckpointError
from foreword.models.config import Llama3RopeScaling, YarnRopeScaling
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.rope import frequencies
from helpers.tiny_models import make_hf_model


@pytest.fixture
def model(tmp_path):
    return make_hf_model(tmp_path / "model", "llama", tied=False, seed=1)


def change_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            del config[key]
        else:
            config[key] = value
    path.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("architecture", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_and_config_are_the_saved_ones(tmp_path, architecture, tied):
    directory = make_hf_model(tmp_path / "model", architecture, tied=tied)
    checkpoint = open_checkpoint(directory)
    saved = load_file(directory / "model.safetensors")
    assert checkpoint.tensor_names() == set(saved)
    for name, tensor in saved.items():
        assert torch.equal(checkpoint.load(name, torch.float32), tensor)
        assert torch.equal(checkpoint.load(name, torch.bfloat16), tensor.bfloat16())
        assert checkpoint.quantized(name) is None
    config = checkpoint.config
    assert config.tied_embeddings == tied
    assert ("lm_head.weight" in checkpoint.tensor_names()) != tied
    assert config.layer.attention.bias == (architecture == "qwen2")
    assert config.layer.attention.qk_norm == (architecture == "qwen3")
    assert config.layer.attention.head_dim == (32 if architecture == "qwen3" else 16)
    assert config.context_length == 512


def test_loaded_tensors_do_not_hang_on_the_file(model):
    checkpoint = open_checkpoint(model)
    tensor = checkpoint.load("model.norm.weight", torch.float32)
    before = tensor.clone()
    (model / "model.safetensors").write_bytes(b"\0" * (model / "model.safetensors").stat().st_size)
    assert torch.equal(tensor, before)


def test_shards_hold_the_same_tensors(tmp_path, model):
    sharded = make_hf_model(tmp_path / "sharded", "llama", tied=False, seed=1, max_shard_size=60_000)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole, parts = open_checkpoint(model), open_checkpoint(sharded)
    assert whole.tensor_names() == parts.tensor_names()
    for name in whole.tensor_names():
        assert torch.equal(whole.load(name, torch.float32), parts.load(name, torch.float32))


def test_a_missing_shard_is_named(tmp_path):
    directory = make_hf_model(tmp_path / "sharded", "llama", max_shard_size=60_000)
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        open_checkpoint(directory)


def test_an_index_that_lies_is_refused(tmp_path):
    directory = make_hf_model(tmp_path / "sharded", "llama", max_shard_size=60_000)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = directory / content["weight_map"]["model.norm.weight"]
    (tmp_path / "outside.safetensors").write_bytes(shard.read_bytes())
    for named in ("../outside.safetensors", "/etc/passwd", "pytorch_model.bin", 3):
        changed = content["weight_map"] | {"model.norm.weight": named}
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(CheckpointError, match="does not map"):
            open_checkpoint(directory)
    index.write_text(json.dumps({"weight_map": content["weight_map"] | {"ghost": shard.name}}))
    with pytest.raises(CheckpointError, match="ghost"):
        open_checkpoint(directory)


def test_both_spellings_of_rope_settings(model):
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    expected = Llama3RopeScaling(8.0, 1.0, 4.0, 64)
    change_config(model, rope_parameters=llama3 | {"rope_type": "llama3", "rope_theta": 7.0})
    assert open_checkpoint(model).config.rope.theta == 7.0
    assert open_checkpoint(model).config.rope.scaling == expected
    for key in ("rope_type", "type"):
        change_config(model, rope_parameters=None, rope_theta=9.0, rope_scaling=llama3 | {key: "llama3"})
        assert open_checkpoint(model).config.rope.theta == 9.0
        assert open_checkpoint(model).config.rope.scaling == expected
    change_config(model, rope_scaling=None, rope_theta=...)
    assert open_checkpoint(model).config.rope.theta == 10000.0
    assert open_checkpoint(model).config.rope.scaling is None


@pytest.mark.parametrize(
    "settings",
    [
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_theta": 7e3,
        },
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, "rope_scaling": {}},
        {
            "rope_parameters": None,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ],
)
def test_rope_settings_are_found_where_transformers_finds_them(model, settings):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    change_config(model, **settings)
    theirs = AutoConfig.from_pretrained(model)
    expected, _ = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, "cpu")
    config = open_checkpoint(model).config
    torch.testing.assert_close(frequencies(config.rope, config.layer.attention.head_dim), expected)


def test_yarn_beside_the_newer_section_is_not_lost(model):
    default = {"rope_type": "default", "rope_theta": 1e4}
    change_config(model, rope_parameters=default, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    config = open_checkpoint(model).config
    assert config.rope.scaling == YarnRopeScaling(2.0, 512)
    assert config.context_length == 1024  # the stated one is that of the pre-training


def test_head_dim_may_be_left_out(model):
    change_config(model, head_dim=...)
    assert open_checkpoint(model).config.layer.attention.head_dim == 16


def test_remote_code_is_never_run(model):
    (model / "evil.py").write_text("raise SystemExit('ran')")
    change_config(model, auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert open_checkpoint(model).config.architecture == "llama"


def test_a_window_caps_no_context(tmp_path):
    directory = make_hf_model(tmp_path / "model", "mistral", sliding_window=100)
    config = open_checkpoint(directory).config
    assert (config.context_length, config.layer.attention.window) == (512, 100)
    longer = open_checkpoint(change_config(directory, sliding_window=4096)).config
    assert longer.layer.attention.window is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "nearest", "--supported"]),
        ({"architectures": None}, ["architecture"]),
        ({"architectures": "LlamaForCausalLM"}, ["architecture"]),
        ({"rope_parameters": {"rope_type": "mrope", "factor": 2.0}}, ["mrope"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["differ between layers"]),
        ({"rope_parameters": [1]}, ["rope_parameters"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ({"partial_rotary_factor": 0.2}, ["partial_rotary_factor"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["bitsandbytes", "GGUF"]),
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"vocab_size": "many"}, ["vocab_size"]),
        ({"vocab_size": True}, ["vocab_size"]),
        ({"num_hidden_layers": 10**9}, ["layers"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 3}, ["heads"]),
        ({"head_dim": 15}, ["odd"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
    ],
)
def test_unsupported_or_damaged_config_is_refused(model, changes, words):
    change_config(model, **changes)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_pickled_weights_are_refused(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        open_checkpoint(model)


def test_other_directories_are_refused(tmp_path, model):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(model)
    (model / "model.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="one of them"):
        open_checkpoint(model)


def test_other_files_are_refused(tmp_path, model):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(model / "model.safetensors")


def test_integer_weights_are_refused(model):
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(weights, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has type int8"):
        open_checkpoint(model).load("model.norm.weight", torch.float32)


def test_a_missing_tensor_is_named(model):
    with pytest.raises(CheckpointError, match="ghost"):
        open_checkpoint(model).load("ghost", torch.float32)


def test_stored_frequencies_are_ignored(model):
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, model / "model.safetensors")
    assert not any("inv_freq" in name for name in open_checkpoint(model).tensor_names())
