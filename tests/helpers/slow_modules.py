"""MTP modules with experts, and with latent attention, written down directly: no pages, every row computed anew."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from helpers.slow_heads import SlowHead, rms, turned


def module_tensors(config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Random ones by the published names, for a model of this config."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    sizes = {"eh_proj": (hidden, 2 * hidden)}
    sizes |= _latent_sizes(config) if "kv_lora_rank" in config else _head_sizes(config)
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    mlps = {f"mlp.experts.{expert}": width for expert in range(experts)}
    mlps["mlp.shared_experts"] = width * config["n_shared_experts"]
    for prefix, inner in mlps.items():
        sizes |= {f"{prefix}.gate_proj": (inner, hidden), f"{prefix}.up_proj": (inner, hidden)}
        sizes[f"{prefix}.down_proj"] = (hidden, inner)
    sizes["mlp.gate"] = (experts, hidden)
    found = {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in sizes.items()
    }
    norms = ["enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"]
    widths = dict.fromkeys(norms, hidden)
    if "kv_lora_rank" in config:
        widths |= {"self_attn.kv_a_layernorm": config["kv_lora_rank"]}
        widths |= {"self_attn.q_a_layernorm": config["q_lora_rank"]}
    else:
        widths |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), config["head_dim"])
        rows = {"q": heads, "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
        for name, count in rows.items():
            found[f"self_attn.{name}_proj.bias"] = torch.randn(
                count * config["head_dim"], generator=generator
            )
    for name, size in widths.items():
        found[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    found["mlp.gate.e_score_correction_bias"] = 0.3 * torch.randn(experts, generator=generator)
    return found


def _head_sizes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
    }


def _latent_sizes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    return {
        "self_attn.q_a_proj": (config["q_lora_rank"], hidden),
        "self_attn.q_b_proj": (heads * (nope + rope), config["q_lora_rank"]),
        "self_attn.kv_a_proj_with_mqa": (rank + rope, hidden),
        "self_attn.kv_b_proj": (heads * (nope + value), rank),
        "self_attn.o_proj": (hidden, heads * value),
    }


@dataclass(frozen=True)
class SlowModule(SlowHead):
    """A module of float64 tensors by speculators' names."""

    def layer(self, index: int, stream: Tensor, read: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        attend = self.latent if "kv_lora_rank" in self.config else self.grouped
        stream = stream + self.linear(attend(read, positions, seen), "layers.0.self_attn.o_proj")
        inner = self.norm(stream, "layers.0.post_attention_layernorm.weight")
        return stream + torch.stack([self.experts(row) for row in inner])

    def grouped(self, read: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Heads of which a part turns."""
        heads, kv_heads, dim = (
            self.config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        part = int(dim * self.config["partial_rotary_factor"])

        def projected(name: str) -> Tensor:
            return self.linear(read, f"layers.0.self_attn.{name}_proj").view(len(read), -1, dim)

        def partly_turned(name: str) -> Tensor:
            normed = self.norm(projected(name), f"layers.0.self_attn.{name}_norm.weight")
            return torch.cat(
                (turned(normed[..., :part], positions, self.config["rope_theta"]), normed[..., part:]), -1
            )

        keys, values = (
            rows.repeat_interleave(heads // kv_heads, dim=1) for rows in (partly_turned("k"), projected("v"))
        )
        return self.mixed(partly_turned("q"), keys, values, seen)

    def latent(self, read: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Keys and values of all heads, from compressed rows; rotated pairs stand side by side."""
        heads, rank, nope = (
            self.config[name] for name in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim")
        )
        theta = self.config["rope_theta"]

        def compressed(x: Tensor, name: str) -> Tensor:
            return rms(x, self.get(f"layers.0.self_attn.{name}.weight"), 1e-6)

        short = compressed(self.linear(read, "layers.0.self_attn.q_a_proj"), "q_a_layernorm")
        queries = self.linear(short, "layers.0.self_attn.q_b_proj").view(len(read), heads, -1)
        row = self.linear(read, "layers.0.self_attn.kv_a_proj_with_mqa")
        rows = compressed(row[:, :rank], "kv_a_layernorm")
        expanded = self.linear(rows, "layers.0.self_attn.kv_b_proj").view(len(read), heads, -1)
        shared = turned_pairs(row[:, None, rank:], positions, theta).expand(-1, heads, -1)
        keys = torch.cat((expanded[..., :nope], shared), -1)
        queries = torch.cat((queries[..., :nope], turned_pairs(queries[..., nope:], positions, theta)), -1)
        return self.mixed(queries, keys, expanded[..., nope:], seen)

    def mixed(self, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        scores = torch.einsum("ihd,jhd->hij", queries, keys) / queries.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, values).flatten(1)

    def experts(self, row: Tensor) -> Tensor:
        """What the shared expert says about a row, and the chosen ones, weighed by scores without the correction."""
        config = self.config
        router, correction = (
            self.get(f"layers.0.mlp.gate.{name}") for name in ("weight", "e_score_correction_bias")
        )
        assert router is not None
        assert correction is not None
        scores = (router @ row).sigmoid()
        choice = scores + correction
        groups = choice.view(config["n_group"], -1)
        worth = groups.sort(dim=-1, descending=True).values[:, :2].sum(-1)
        best = set(worth.argsort(descending=True)[: config["topk_group"]].tolist())
        size = groups.shape[1]
        allowed = [expert for expert in range(len(choice)) if expert // size in best]
        taken = sorted(allowed, key=lambda expert: -float(choice[expert]))[: config["num_experts_per_tok"]]
        total = sum(float(scores[expert]) for expert in taken)
        said = self.mlp(row, "layers.0.mlp.shared_experts")
        for expert in taken:
            share = float(scores[expert]) / total * config["routed_scaling_factor"]
            said = said + share * self.mlp(row, f"layers.0.mlp.experts.{expert}")
        return said

    def mlp(self, row: Tensor, name: str) -> Tensor:
        gate, up = (self.linear(row, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self.linear(silu(gate) * up, f"{name}.down_proj")


def turned_pairs(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [rows, heads, dim] whose pairs stand side by side, as complex numbers."""
    count = x.shape[-1] // 2
    angles = positions[:, None].double() / theta ** (torch.arange(count).double() / count)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], count, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)
