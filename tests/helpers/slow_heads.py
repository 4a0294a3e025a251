"""EAGLE's mathematics written down directly: no KV cache, no pages, every row computed anew. Slow and right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [rows, heads, dim], half of each head against the other half."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() / theta ** (torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


@dataclass(frozen=True)
class SlowHead:
    """A head of float64 tensors by speculators' names."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    flags: Mapping[str, bool]

    def get(self, name: str) -> Tensor | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.double()

    def linear(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.get(name + ".weight"), self.get(name + ".bias")
        assert weight is not None
        return x @ weight.T + (0 if bias is None else bias)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.get(name), self.config["rms_norm_eps"])

    def layer(self, index: int, stream: Tensor, read: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        prefix, rows = f"layers.{index}.", len(stream)
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        theta = self.config.get("rope_theta", 10000.0)
        q, k, v = (
            self.linear(read, f"{prefix}self_attn.{name}_proj").view(rows, count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q = turned(self.norm(q, f"{prefix}self_attn.q_norm.weight"), positions, theta)
        k = turned(self.norm(k, f"{prefix}self_attn.k_norm.weight"), positions, theta)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v).reshape(rows, -1)
        stream = stream + self.linear(mixed, f"{prefix}self_attn.o_proj")
        inner = self.norm(stream, f"{prefix}post_attention_layernorm.weight")
        gate, up = (self.linear(inner, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
        return stream + self.linear(torch.nn.functional.silu(gate) * up, f"{prefix}mlp.down_proj")

    def rows(
        self, tokens: Sequence[int], features: Tensor, positions: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(logits, states to feed back) of rows whose features are as wide as the head."""
        embedding = self.get("embed_tokens.weight")
        assert embedding is not None
        embedded = embedding[torch.tensor(tokens)]
        if self.flags.get("fused"):
            parts = [self.norm(embedded, "enorm.weight"), self.norm(features, "hnorm.weight")]
            stream = self.linear(
                torch.cat(parts[::-1] if self.flags.get("hidden_first") else parts, -1), "fc"
            )
            read = self.norm(stream, "layers.0.input_layernorm.weight")
        else:
            normed = self.norm(features, "layers.0.hidden_norm.weight")
            read = torch.cat((self.norm(embedded, "layers.0.input_layernorm.weight"), normed), -1)
            stream = normed if self.flags.get("norm_before_residual") else features
        for index in range(self.config["num_hidden_layers"]):
            if index:
                read = self.norm(stream, f"layers.{index}.input_layernorm.weight")
            stream = self.layer(index, stream, read, positions, seen)
        normed = self.norm(stream, "norm.weight")
        head = self.tensors["lm_head.weight"].double() if "lm_head.weight" in self.tensors else embedding
        return normed @ head.T, normed if self.flags.get("norm_output") else stream

    def reduced(self, states: Tensor, taps: int) -> Tensor:
        """The target's states [tokens, taps * width] as features."""
        if self.flags.get("fused") or "fc.weight" not in self.tensors:
            return states
        if "fc_norm.0.weight" in self.tensors:
            parts = states.chunk(taps, -1)
            states = torch.cat([self.norm(x, f"fc_norm.{i}.weight") for i, x in enumerate(parts)], -1)
        return self.linear(self.norm(states, "input_norm.weight"), "fc")

    def chain(self, tokens: Sequence[int], states: Tensor, guesses: Sequence[int], taps: int) -> list[Tensor]:
        """Logits over the head's vocabulary after the text and after every guess.

        `states` are those of all tokens but the newest. Slot t holds token t + 1 and the features of t.
        """
        line = [*tokens[1:]]
        features = self.reduced(states.double(), taps)
        found = []
        for guess in [*guesses, None]:
            rows = len(line)
            seen = torch.ones(rows, rows).tril().bool()
            logits, own = self.rows(line, features, torch.arange(rows), seen)
            found.append(logits[-1])
            if guess is not None:
                line.append(guess)
                features = torch.cat((features, own[-1:]))
        return found


def target_states(
    model: Any, tokens: Sequence[int], boundaries: Sequence[int], normed: bool = False
) -> Tensor:
    """[tokens, boundaries * hidden] of a transformers model: the residual stream after so many layers."""
    caught: dict[int, Tensor] = {}

    def catch(boundary: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            caught[boundary] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    hooks = [model.model.embed_tokens.register_forward_hook(catch(0))]
    hooks += [layer.register_forward_hook(catch(i + 1)) for i, layer in enumerate(model.model.layers)]
    hooks.append(model.model.norm.register_forward_hook(catch(-1)))
    try:
        with torch.no_grad():
            model(torch.tensor([list(tokens)]))
    finally:
        for hook in hooks:
            hook.remove()
    chosen = [-1] if normed else boundaries
    return torch.cat([caught[boundary].view(len(tokens), -1) for boundary in chosen], -1)
