"""What config.json says about families, read without any weights: layers, windows, experts, rope; hostile values."""

from pathlib import Path
from typing import Any

import pytest

from foreword.errors import CheckpointError
from foreword.models.config import FrequencyFactors, ModelConfig, RopeSpec, YarnRopeScaling
from foreword.models.formats.hf.config import hf_config
from foreword.models.rope import frequencies

PATH = Path("config.json")
_BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK = {
    **_MOE,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 32, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"sliding_window": 32, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    ),
    "phi3": ("Phi3ForCausalLM", {"rope_scaling": _LONGROPE, "original_max_position_embeddings": 64}),
    "granite": ("GraniteForCausalLM", {"attention_multiplier": 0.1}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**_MOE, "num_experts": 8, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2},
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {**_MOE, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32},
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _DEEPSEEK),
}


BEYOND_DOUBLES = pytest.param(10**400, id="huge")
HOSTILE: list[Any] = [-1, 0, 2**40, True, "many", [1], {"a": 1}, 1.5, float("nan"), BEYOND_DOUBLES]


def inverse_frequencies_of(config: ModelConfig) -> None:
    """What a backend computes first of rotary settings."""
    for layer in dict.fromkeys(config.layers):
        found = frequencies(layer.attention.rope or config.rope, layer.attention.rotary_dim)
        assert found.isfinite().all()


def read(model: str, **changes: Any) -> ModelConfig:
    """The config of a model with 8 experts wherever its first reading says that there are some."""
    hf_class, settings = MODELS[model]
    values = _BASE | settings | changes | {"architectures": [hf_class]}
    names = {f"model.layers.{index}.input_layernorm.weight" for index in range(4)}
    sparse = {"mixtral": range(4), "gpt_oss": range(4), "qwen2_moe": (1, 3)}.get(model, range(1, 4))
    if "num_experts_per_tok" in settings:
        names |= {f"model.layers.{index}.mlp.experts.{expert}.x" for index in sparse for expert in range(8)}
    return hf_config(values, frozenset(names), PATH)


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


def test_which_layers_have_the_window():
    assert windows(read("gemma2")) == [32, None, 32, None]
    assert windows(read("gemma3", sliding_window_pattern=3)) == [32, 32, None, 32]
    assert windows(read("qwen2")) == [None, None, 32, 32]
    assert windows(read("qwen2", use_sliding_window=False)) == [None] * 4
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(read("qwen2", layer_types=kinds)) == [32, None, None, 32]
    assert windows(read("smollm3", use_sliding_window=True, sliding_window=9)) == [None, None, None, 9]


def test_local_layers_turn_their_own_way_even_where_the_window_is_as_long_as_the_context():
    ropes = [layer.attention.rope for layer in read("gemma3", sliding_window=4096).layers]
    assert ropes == [RopeSpec(1e4), None, RopeSpec(1e4), None]
    assert read("gemma3").rope.theta == 1e6


def test_layers_without_rotation_and_without_experts():
    assert [layer.attention.is_rotated for layer in read("smollm3").layers] == [True, True, True, False]
    listed = read("smollm3", no_rope_layers=[0, 1, 1, 0])
    assert [layer.attention.is_rotated for layer in listed.layers] == [False, True, True, False]
    experts = [layer.mlp.experts is not None for layer in read("qwen2_moe").layers]
    assert experts == [False, True, False, True]


def test_clamped_experts_have_a_limit_that_older_files_do_not_state():
    limits = [read("gpt_oss", **stated).layers[0].mlp.experts for stated in ({}, {"swiglu_limit": 5.0})]
    assert [experts and experts.clamp for experts in limits] == [7.0, 5.0]
    assert read("gpt_oss", swiglu_alpha=1.702)
    with pytest.raises(CheckpointError, match=r"swiglu_alpha other than 1\.702 is not supported"):
        read("gpt_oss", swiglu_alpha=1.5)


@pytest.mark.parametrize("dense", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_a_missing_size_that_a_layer_needs_is_named(dense: dict[str, Any]):
    values = _BASE | _MOE | dense | {"num_experts": 2, "architectures": ["Qwen3MoeForCausalLM"]}
    del values["intermediate_size"]
    with pytest.raises(CheckpointError, match="intermediate_size is missing"):
        hf_config(values, frozenset(f"model.layers.{layer}.x" for layer in range(4)), PATH)


def test_sizes_that_no_layer_has_may_be_missing():
    """Published mixtures of Qwen3.5 have no dense MLP, published dense models of Nemotron-H no experts."""
    linear = {
        f"linear_{name}": 4 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    }
    values = _BASE | _MOE | linear | {"linear_conv_kernel_dim": 4, "num_experts": 2}
    values |= {"shared_expert_intermediate_size": 32, "architectures": ["Qwen3_5MoeForCausalLM"]}
    del values["intermediate_size"]
    names = {f"model.layers.{layer}.mlp.experts.{expert}.x" for layer in range(4) for expert in range(2)}
    assert {layer.mlp.intermediate_size for layer in hf_config(values, frozenset(names), PATH).layers} == {32}

    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4}
    values = _BASE | mamba | {"hybrid_override_pattern": "M-*-", "architectures": ["NemotronHForCausalLM"]}
    values["layer_norm_epsilon"] = 1e-5
    config = hf_config(values, frozenset(f"model.layers.{layer}.x" for layer in range(4)), PATH)
    assert [layer.mlp.intermediate_size for layer in config.layers] == [0, 96, 0, 96]
    assert [layer.mixes for layer in config.layers] == [True, False, True, False]


def test_longrope_goes_by_the_context():
    assert read("phi3").rope.scaling == FrequencyFactors((2.0,) * 8)
    short = read("phi3", original_max_position_embeddings=512)
    assert short.rope == RopeSpec(1e4, FrequencyFactors((1.0,) * 8), 1.0)


def test_dynamic_scaling_begins_behind_the_context():
    assert read("llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0}).rope.scaling is None


def test_yarn_stretches_the_context():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = read("llama", rope_scaling=scaling)
    assert config.rope.scaling == YarnRopeScaling(4.0, 512)
    assert config.context_length == 2048


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("gemma2", "sliding_window"),
        ("gemma2", "query_pre_attn_scalar"),
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
        ("gemma3", "rope_local_base_freq"),
        ("gemma3", "sliding_window_pattern"),
        ("granite", "attention_multiplier"),
        ("granite", "residual_multiplier"),
        ("granite", "embedding_multiplier"),
        ("granite", "logits_scaling"),
        ("smollm3", "no_rope_layers"),
        ("smollm3", "no_rope_layer_interval"),
        ("qwen2", "layer_types"),
        ("qwen2", "max_window_layers"),
        ("mixtral", "num_local_experts"),
        ("mixtral", "num_experts_per_tok"),
        ("qwen2_moe", "num_experts"),
        ("qwen2_moe", "moe_intermediate_size"),
        ("qwen2_moe", "shared_expert_intermediate_size"),
        ("qwen2_moe", "decoder_sparse_step"),
        ("qwen2_moe", "mlp_only_layers"),
        ("qwen2_moe", "norm_topk_prob"),
        ("glm4_moe", "partial_rotary_factor"),
        ("glm4_moe", "use_qk_norm"),
        ("glm4_moe", "routed_scaling_factor"),
        ("glm4_moe", "n_shared_experts"),
        ("glm4_moe", "first_k_dense_replace"),
        ("deepseek_v2", "topk_method"),
        ("deepseek_v3", "n_group"),
        ("deepseek_v3", "topk_group"),
        ("deepseek_v3", "kv_lora_rank"),
        ("deepseek_v3", "q_lora_rank"),
        ("deepseek_v3", "qk_rope_head_dim"),
        ("deepseek_v3", "qk_nope_head_dim"),
        ("deepseek_v3", "v_head_dim"),
        ("deepseek_v3", "rope_interleave"),
        ("deepseek_v3", "moe_layer_freq"),
        ("deepseek_v3", "scoring_func"),
        ("deepseek_v3", "topk_method"),
        ("deepseek_v3", "norm_topk_prob"),
        ("deepseek_v3", "routed_scaling_factor"),
        ("deepseek_v3", "num_experts_per_tok"),
        ("deepseek_v3", "n_routed_experts"),
        ("deepseek_v3", "moe_intermediate_size"),
        ("deepseek_v3", "attention_bias"),
        ("gemma2", "hidden_activation"),
        ("gemma2", "layer_types"),
        ("gemma3", "layer_types"),
        ("qwen2", "sliding_window"),
        ("qwen2", "use_sliding_window"),
        ("qwen2_moe", "qkv_bias"),
        ("smollm3", "use_sliding_window"),
        ("granite", "mlp_bias"),
        ("phi3", "original_max_position_embeddings"),
        ("phi3", "rope_scaling"),
        ("gemma3", "rope_parameters"),
    ],
)
def test_a_hostile_value_is_one_clear_line_or_harmless(model: str, key: str, value: Any):
    read_or_refused(model, **{key: value})


_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    ("model", "section", "key"),
    [
        *(("deepseek_v3", _YARN, key) for key in _YARN),
        *(("llama", _YARN, key) for key in ("attention_factor", "beta_fast", "beta_slow", "truncate")),
        *(("phi3", _LONGROPE, key) for key in ("short_factor", "long_factor", "factor", "attention_factor")),
        *(("llama", {"type": "linear", "factor": 2.0}, key) for key in ("factor", "rope_theta")),
        ("llama", {"type": "dynamic", "factor": 2.0}, "factor"),
        ("gemma3", {"full_attention": {"rope_theta": 1e6}}, "sliding_attention"),
    ],
)
def test_hostile_rotary_settings(model: str, section: dict[str, Any], key: str, value: Any):
    where = "rope_parameters" if model == "gemma3" else "rope_scaling"
    read_or_refused(model, **{where: section | {key: value}})


def read_or_refused(model: str, **changes: Any) -> None:
    try:
        config = read(model, **changes)
        inverse_frequencies_of(config)
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 300
    else:  # a number that could be meant: what it describes is not larger than a file that is really there
        assert len(config.layers) == 4


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("mixtral", {"num_local_experts": 10**9}, "8 experts and not 1000000000"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, not at most 8"),
        ("deepseek_v3", {"n_group": 3}, "n_group is 3, not a number that divides 8"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 2}, "two experts each"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group is 5, not at most 4"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, not at most 4"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' in this family"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy' in this family"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "noaux_tc"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7, not even"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("qwen2", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ("llama", {"layer_types": ["sliding_attention"] * 4}, "sliding window in this family"),
        ("phi3", {"rope_scaling": _LONGROPE | {"long_factor": [1.0] * 7}}, "long_factor"),
        ("phi3", {"rope_scaling": _LONGROPE | {"long_factor": [1.0] * 7 + [0]}}, "long_factor"),
        ("phi3", {"rope_scaling": _LONGROPE | {"long_factor": [1.0] * 7 + [10**400]}}, "long_factor"),
        ("phi3", {"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 0}}, "factor"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}, "truncate"),
        ("llama", {"rope_theta": 0.5, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope_theta"),
        ("llama", {"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    ],
)
def test_values_that_contradict_each_other_are_named(model: str, changes: dict[str, Any], words: str):
    with pytest.raises(CheckpointError, match=words):
        read(model, **changes)
