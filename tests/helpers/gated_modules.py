"""Random MTP modules as Qwen3-Next and Qwen3.5 publish them."""

from typing import Any

import torch
from torch import Tensor

LAYERS, VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS = 2, 360, 64, 4, 2, 32, 4
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 512,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
}
OURS = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "fc", "norm": "norm"}


def module_tensors(has_experts: bool) -> dict[str, Tensor]:
    """By the published names."""
    generator = torch.Generator().manual_seed(5)
    layer = {
        "self_attn.q_proj": (2 * HEADS * DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    }
    mlps = {"mlp": CONFIG["intermediate_size"]}
    if has_experts:
        mlps = {f"mlp.experts.{expert}": CONFIG["moe_intermediate_size"] for expert in range(EXPERTS)}
        mlps["mlp.shared_expert"] = CONFIG["shared_expert_intermediate_size"]
        layer |= {"mlp.gate": (EXPERTS, HIDDEN), "mlp.shared_expert_gate": (1, HIDDEN)}
    for name, inner in mlps.items():
        layer |= {f"{name}.{part}_proj": (inner, HIDDEN) for part in ("gate", "up")}
        layer[f"{name}.down_proj"] = (HIDDEN, inner)
    shapes: dict[str, tuple[int, ...]] = {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes["fc"] = (HIDDEN, 2 * HIDDEN)
    norms = {name: HIDDEN for name in OURS if "norm" in name}
    norms |= {f"layers.0.{name}": HIDDEN for name in ("input_layernorm", "post_attention_layernorm")}
    norms |= {f"layers.0.self_attn.{name}_norm": DIM for name in "qk"}
    found = {
        f"mtp.{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    for name, size in norms.items():
        found[f"mtp.{name}.weight"] = 0.3 * torch.randn(size, generator=generator)  # around 0, not 1
    return found
