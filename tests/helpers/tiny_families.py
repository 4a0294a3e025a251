"""Tiny random checkpoints of every family in the published layout, made by transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foreword.models.config import ModelConfig
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.hf.config import hf_config, hf_family, layer_specs
from helpers.tiny_models import TINY_VOCAB, write_tiny_tokenizer

WINDOW = 7
"""Shorter than every prompt of the tests, and than the paths of their trees."""

_MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_DEEPSEEK = {
    **_MOE,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}

_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
}
_MAMBA = {
    "num_hidden_layers": 3,
    "mamba_d_conv": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_chunk_size": 32,
    "max_position_embeddings": 512,
}
_GRANITE = {
    **_MAMBA,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 5.0,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", _DELTA),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_DELTA, **_MOE, "num_experts": 5, "shared_expert_intermediate_size": 40},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**_DELTA, **_MOE, "num_experts": 5, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "granite_hybrid": ("GraniteMoeHybrid", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite_dense": (
        "GraniteMoeHybrid",
        {**_GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
            "num_hidden_layers": 5,
            "head_dim": 16,
            "conv_kernel": 4,
            "ssm_state_size": 10,
            "mamba_num_heads": 4,
            "mamba_head_dim": 24,
            "n_groups": 2,
            "chunk_size": 32,
            "layer_norm_epsilon": 1e-5,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "time_step_min": 1e-6,
            "max_position_embeddings": 512,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "block_multiple_of": 16,
            "norm_eps": 1e-5,
            "max_position_embeddings": 512,
        },
    ),
}
"""Families with recurrent layers."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "mimo": ("Qwen2", {"head_dim": 24}),  # which transformers does not have, and whose layers are Qwen2's
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {
            "sliding_window": WINDOW,
            "original_max_position_embeddings": 24,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
                "long_factor": [1.0 + 0.5 * pair for pair in range(6)],
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 5.0,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "yarn": ("Qwen3", {"rope_parameters": YARN}),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_MOE, "num_experts": 5, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": ("Qwen3Moe", {**_MOE, "num_experts": 5, "norm_topk_prob": True, "head_dim": 16}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "head_dim": 16,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_MOE,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 16,
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**_DEEPSEEK, "topk_method": "group_limited_greedy", "q_lora_rank": None}),
    "deepseek_v3": (
        "DeepseekV3",
        {**_DEEPSEEK, "q_lora_rank": 14, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
}
"""By a name of ours: how transformers calls its classes, and what is set otherwise."""

_BASE: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "dtype": "float32",
}


def make_family(directory: Path, family: str, **overrides: Any) -> tuple[Path, nn.Module]:
    """A checkpoint, and the model of transformers that it was saved from."""
    import transformers

    name, settings = (FAMILIES | HYBRIDS)[family]
    config_class = f"{name}TextConfig" if name in ("Gemma3", "Qwen3_5", "Qwen3_5Moe") else f"{name}Config"
    # Eager: some versions select SDPA where it lacks what the family needs, such as Gemma 2's soft caps.
    eager = {"attn_implementation": "eager"}
    config = getattr(transformers, config_class)(**(_BASE | settings | eager | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(family))
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        _randomize(model)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory)
    if family == "mimo":
        change_config(directory, architectures=["MiMoForCausalLM"], model_type="mimo")
    return directory, model.eval()


def family_config(family: str) -> ModelConfig:
    """The same shape without transformers and without weights."""
    name, settings = (FAMILIES | HYBRIDS)[family]
    values = _BASE | settings | {"architectures": [f"{'MiMo' if family == 'mimo' else name}ForCausalLM"]}
    count, path = values["num_hidden_layers"], Path(family)
    specs = layer_specs(ConfigFields(values, family), hf_family(values, path), count)
    names = ["lm_head.weight", *(f"model.layers.{layer}.input_layernorm.weight" for layer in range(count))]
    for layer, spec in enumerate(specs):
        experts = range(spec.mlp.experts.count if spec.mlp.experts else 0)
        names += [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for expert in experts]
    return hf_config(values, frozenset(names), path)


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Values that a loader cannot get right by default, for norms, biases and routers, too."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.3)


def change_config(directory: Path, **changes: Any) -> Path:
    """config.json with other values; `...` takes a key away."""
    file = directory / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in settings.items() if value is not ...}
    file.write_text(json.dumps(kept), encoding="utf-8")
    return directory
