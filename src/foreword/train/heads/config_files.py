"""Makes config.json and tokenizer files of trained drafters, in the formats of speculators and Hugging Face."""

import json
from typing import Any

from foreword.errors import RequestError
from foreword.models.architectures.registry import ARCHITECTURES
from foreword.models.config import (
    FrequencyFactors,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
    RopeSpec,
    YarnRopeScaling,
)
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.tokenization.tokenizer import Tokenizer


def speculators_config(algorithm: str, checkpoint: Checkpoint, draft_tokens: int) -> dict[str, Any]:
    """Return the settings common to all heads in the format of speculators: algorithm, target and proposal method."""
    family = next(family for family in ARCHITECTURES if family.name == checkpoint.config.architecture)
    return {
        "speculators_model_type": algorithm,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_tokens}],
            "verifier": {"name_or_path": checkpoint.path.name, "architectures": [family.hf_class]},
        },
    }


def hf_settings(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the contents of config.json for a decoder."""
    family = next(family for family in ARCHITECTURES if family.name == config.architecture)
    attention, mlp = config.layer.attention, config.layer.mlp
    settings: dict[str, Any] = {
        "architectures": [family.hf_class],
        "model_type": family.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": mlp.activation,
        "rms_norm_eps": config.norm.eps,
        "max_position_embeddings": config.context_length,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "bfloat16",
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": sorted(tokenizer.eos_ids),
        **_rope(config.rope),
    }
    for switch, value in ((family.attention_bias, attention.bias), (family.mlp_bias, mlp.bias)):
        if switch.key is not None:
            settings[switch.key] = value
    return settings


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the texts of tokenizer.json and tokenizer_config.json by file name."""

    def text(token: int) -> str:
        return tokenizer.token_bytes(token, skip_special_tokens=False).decode("utf-8", errors="replace")

    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer.bos_id is not None:
        settings["bos_token"] = text(tokenizer.bos_id)
    if tokenizer.eos_ids:
        settings["eos_token"] = text(min(tokenizer.eos_ids))
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    return {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }


def _rope(rope: RopeSpec) -> dict[str, Any]:
    match rope.scaling:
        case None:
            return {"rope_theta": rope.theta, "rope_scaling": None}
        case LinearRopeScaling(factor):
            scaling: dict[str, Any] = {"rope_type": "linear", "factor": factor}
        case Llama3RopeScaling() as llama3:
            scaling = {
                "rope_type": "llama3",
                "factor": llama3.factor,
                "low_freq_factor": llama3.low_freq_factor,
                "high_freq_factor": llama3.high_freq_factor,
                "original_max_position_embeddings": llama3.original_context,
            }
        case FrequencyFactors() | YarnRopeScaling():
            raise RequestError(
                "config.json cannot express this model's rotary scaling; train another kind of drafter"
            )
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
