"""A trained EAGLE-3 head in the layout of speculators, which vLLM and we read."""

from typing import TYPE_CHECKING, Any

from foreword.models.architectures.registry import ARCHITECTURES
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint

if TYPE_CHECKING:
    from foreword.train.heads.eagle3 import Eagle3Head


def eagle3_config(head: "Eagle3Head", checkpoint: Checkpoint, guesses: int) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(head.vocabulary.token_ids),
        "target_hidden_size": None,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": layer_config(checkpoint.config, head.intermediate),
        "speculators_config": speculators_section("eagle3", checkpoint, guesses),
    }


def layer_config(target: ModelConfig, intermediate: int, num_layers: int = 1) -> dict[str, Any]:
    """A llama layer with the target's sizes, as Hugging Face writes it."""
    attention = target.layer.attention
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": target.norm.eps,
        "rope_theta": target.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab_size,
    }


def speculators_section(algorithm: str, checkpoint: Checkpoint, guesses: int) -> dict[str, Any]:
    """What speculators says of every head: how it is asked, and for which target."""
    family = next(family for family in ARCHITECTURES if family.name == checkpoint.config.architecture)
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": guesses}],
        "verifier": {"name_or_path": checkpoint.path.name, "architectures": [family.hf_class]},
    }
