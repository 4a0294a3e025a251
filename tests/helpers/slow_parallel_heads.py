"""Medusa, P-EAGLE and DFlash written down directly from their papers: no KV cache, every row computed anew."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from helpers.slow_heads import SlowHead, turned


def slow_medusa(
    tensors: Mapping[str, Tensor], state: Tensor, heads: int, blocks: int, output: Tensor
) -> Tensor:
    """[heads, vocab] after one state; by Medusa's own names, `output` for heads that have none."""
    found = []
    for head in range(heads):
        y = state.double()
        for block in range(blocks):
            name = f"{head}.{block}.linear."
            bias = tensors.get(name + "bias", torch.zeros(())).double()
            y = y + silu(tensors[name + "weight"].double() @ y + bias)
        found.append(tensors.get(f"{head}.{blocks}.weight", output).double() @ y)
    return torch.stack(found)


def slow_p_eagle(
    slow: SlowHead, tokens: Sequence[int], states: Tensor, masks: int, mask: int, taps: int
) -> Tensor:
    """[1 + masks, draft vocab] after a text whose states but the newest token's are known."""
    hidden = slow.tensors["mask_hidden"].double().view(1, -1).expand(masks, -1)
    features = slow.reduced(torch.cat((states.double(), hidden)), taps)
    line = [*tokens[1:], *[mask] * masks]
    rows = len(line)
    logits, _ = slow.rows(line, features, torch.arange(rows), torch.ones(rows, rows).tril().bool())
    return logits[-1 - masks :]


class SlowDFlash:
    """A DFlash head of float64 tensors."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        causal: bool = False,
        embedding_scale: float = 1.0,
    ) -> None:
        self._slow = SlowHead(tensors, config, {})
        self._causal, self._scale = causal, embedding_scale

    def block(self, tokens: Sequence[int], states: Tensor, size: int, mask: int, first: int = 0) -> Tensor:
        """[size, hidden], normed: the newest token and masks, over the states of tokens from `first` on."""
        slow, begin = self._slow, len(tokens) - 1
        context = slow.norm(slow.linear(states[first:].double(), "fc"), "hidden_norm.weight")
        past, ahead = torch.arange(first, begin), torch.arange(begin, begin + size)
        embedding = slow.tensors["embed_tokens.weight"].double()
        z = self._scale * embedding[torch.tensor([tokens[-1], *[mask] * (size - 1)])]
        for index in range(slow.config["num_hidden_layers"]):
            y = slow.norm(z, f"layers.{index}.input_layernorm.weight")
            name = f"layers.{index}.attention_conv"
            attended = self._attention(index, self._convolved(y, y, name, 0), context, past, ahead)
            z = z + self._convolved(attended, y, name, 1)
            inner = slow.norm(z, f"layers.{index}.post_attention_layernorm.weight")
            name = f"layers.{index}.mlp_conv"
            x = self._convolved(inner, inner, name, 0)
            gate, up = (slow.linear(x, f"layers.{index}.mlp.{kind}_proj") for kind in ("gate", "up"))
            z = z + self._convolved(
                slow.linear(silu(gate) * up, f"layers.{index}.mlp.down_proj"), inner, name, 1
            )
        return slow.norm(z, "norm.weight")

    def _convolved(self, values: Tensor, deciding: Tensor, name: str, side: int) -> Tensor:
        """DFlash2's convolution, number by number; `deciding` are the rows that its weights are made from."""
        base = self._slow.tensors.get(name + ".base_kernel")
        if base is None:
            return values
        rows, channels = values.shape
        taps = base.shape[1]
        made = self._slow.linear(deciding, name + ".kernel_projection").view(rows, 2, taps, -1)
        group = channels // made.shape[-1]
        result = torch.zeros_like(values)
        for row in range(rows):
            for tap in range(min(taps, row + 1)):
                for channel in range(channels):
                    weight = base[side, tap, channel].double() + made[row, side, tap, channel // group]
                    result[row, channel] += weight * values[row - tap, channel]
        return result

    def _attention(self, index: int, y: Tensor, context: Tensor, past: Tensor, ahead: Tensor) -> Tensor:
        slow, prefix = self._slow, f"layers.{index}.self_attn."
        theta, counts = slow.config["rope_theta"], slow.config

        def heads(x: Tensor, name: str, count: int) -> Tensor:
            return slow.linear(x, f"{prefix}{name}_proj").view(len(x), count, -1)

        kv = counts["num_key_value_heads"]
        q = slow.norm(heads(y, "q", counts["num_attention_heads"]), prefix + "q_norm.weight")
        both = torch.cat((context, y))
        k = slow.norm(heads(both, "k", kv), prefix + "k_norm.weight")
        q, k = turned(q, ahead, theta), turned(k, torch.cat((past, ahead)), theta)
        k, v = (x.repeat_interleave(q.shape[1] // kv, dim=1) for x in (k, heads(both, "v", kv)))
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        if self._causal:
            hidden = torch.cat((past, ahead))[None] > ahead[:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(y), -1)
        return slow.linear(mixed, prefix + "o_proj")
