"""Tiny random draft heads in the layouts in which they are published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
"""Sizes of the heads, as the tiny models have them."""


class TinyHead:
    """Tensors by speculators' names, and the config that all layouts are made of."""

    def __init__(
        self,
        vocab: int,
        *,
        draft_vocab: int | None = None,
        taps: int = 3,
        target_hidden: int = HIDDEN,
        layers: int = 1,
        bias: bool = False,
        fc_bias: bool = False,
        qk_norm: bool = False,
        norms: str = "",  # of the features: "whole", "each"
        own_ends: bool = True,
        inner: int = INNER,
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab, self.draft_vocab = vocab, draft_vocab or vocab
        self.taps, self.target_hidden = taps, target_hidden
        self.tensors: dict[str, Tensor] = {}
        self.config: dict[str, Any] = {
            "hidden_size": HIDDEN,
            "intermediate_size": inner,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "num_hidden_layers": layers,
            "vocab_size": vocab,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000.0,
            "max_position_embeddings": 512,
            "hidden_act": "silu",
            "model_type": "llama",
        }
        self._ends(own_ends)
        for index in range(layers):
            self._layer(index, bias, qk_norm, inner)
        self.fc_bias, self.norms = fc_bias, norms

    def eagle3(self) -> "TinyHead":
        """What only EAGLE-3 has."""
        self.matrix("fc.weight", HIDDEN, self.taps * self.target_hidden)
        if self.fc_bias:
            self.vector("fc.bias", HIDDEN, 0.0)
        if self.norms == "whole":
            self.vector("input_norm.weight", self.taps * self.target_hidden)
        if self.norms == "each":
            for tap in range(self.taps):
                self.vector(f"fc_norm.{tap}.weight", self.target_hidden)
        for name in ("q", "k", "v"):
            rows = self.tensors[f"layers.0.self_attn.{name}_proj.weight"].shape[0]
            self.matrix(f"layers.0.self_attn.{name}_proj.weight", rows, 2 * HIDDEN)
        self.vector("layers.0.hidden_norm.weight", HIDDEN)
        self.vector("layers.0.input_layernorm.weight", HIDDEN)
        self.vector("norm.weight", HIDDEN)
        return self

    def eagle(self) -> "TinyHead":
        """What only EAGLE-1 and EAGLE-2 have."""
        self.matrix("fc.weight", HIDDEN, 2 * HIDDEN)
        if self.fc_bias:
            self.vector("fc.bias", HIDDEN, 0.0)
        self.tensors.pop("lm_head.weight", None)
        return self

    def p_eagle(self) -> "TinyHead":
        """EAGLE-3, and what stands for hidden states that are not known yet."""
        self.eagle3()
        width = self.taps * self.target_hidden
        self.tensors["mask_hidden"] = torch.randn(1, 1, width, generator=self.generator)
        return self

    def mtp(self) -> "TinyHead":
        """What only MTP modules have, by DeepSeek's names; the target lends the ends."""
        self.matrix("eh_proj.weight", HIDDEN, 2 * HIDDEN)
        for name in ("enorm", "hnorm", "shared_head.norm", "input_layernorm"):
            self.vector(name + ".weight", HIDDEN)
        layer = {
            name.removeprefix("layers.0."): tensor
            for name, tensor in self.tensors.items()
            if name.startswith("layers.0.")
        }
        kept = {name: tensor for name, tensor in self.tensors.items() if "norm" in name or "eh_proj" in name}
        self.tensors = {k: v for k, v in (layer | kept).items() if not k.startswith("layers.")}
        return self

    def dflash(self) -> "TinyHead":
        """What only DFlash heads have."""
        self.matrix("fc.weight", HIDDEN, self.taps * self.target_hidden)
        for name in ("hidden_norm", "norm", "layers.0.input_layernorm"):
            self.vector(name + ".weight", HIDDEN)
        return self

    def dspark(self, confidence: int = 0, rank: int = 8) -> "TinyHead":
        """DFlash, with a Markov head; its confidence reads so many numbers, 0: it has none."""
        self.dflash()
        for number, rows in ((1, self.vocab), (2, self.draft_vocab)):
            name = f"markov_head.markov_w{number}.weight"
            self.matrix(name, rows, rank)
            self.tensors[name] *= 4.0  # so that the token before matters
        if confidence:
            self.matrix("confidence_head.proj.weight", 1, confidence)
            self.vector("confidence_head.proj.bias", 1, 0.0)
        return self

    def dflash2(self, taps: int = 2, group: int = 8, rank: int = 8) -> "TinyHead":
        """DFlash, with convolutions around all sublayers and a selector of candidates."""
        self.dflash()
        for layer in range(self.config["num_hidden_layers"]):
            for module in ("attention_conv", "mlp_conv"):
                prefix = f"layers.{layer}.{module}."
                base = 0.3 * torch.randn(2, taps, HIDDEN, generator=self.generator)
                base[:, 0] += 1.0
                self.tensors[prefix + "base_kernel"] = base
                self.matrix(prefix + "kernel_projection.weight", 2 * taps * HIDDEN // group, HIDDEN)
        for name, rows in (("predecessor", self.vocab), ("successor", self.draft_vocab)):
            self.tensors[f"candidate_selector.{name}_codebook"] = torch.randn(
                rows, rank, generator=self.generator
            )
        self.matrix("candidate_selector.hidden_projection.weight", rank, HIDDEN)
        return self

    def medusa(self, heads: int, blocks: int = 1, bias: bool = True, outputs: bool = True) -> "TinyHead":
        """Medusa's own names: blocks, and behind them the output matrix."""
        self.tensors = {}
        self.config = {"medusa_num_heads": 2, "medusa_num_layers": blocks}  # a wrong number, as published
        for head in range(heads):
            for block in range(blocks):
                self.matrix(f"{head}.{block}.linear.weight", HIDDEN, HIDDEN)
                if bias:
                    self.vector(f"{head}.{block}.linear.bias", HIDDEN, 0.0)
            if outputs:
                self.matrix(f"{head}.{blocks}.weight", self.draft_vocab, HIDDEN)
        return self

    def save(self, directory: Path, names: dict[str, str] | None = None, **config: Any) -> Path:
        """Write it with names that begin otherwise, and with more in its config."""
        directory.mkdir(parents=True, exist_ok=True)

        def renamed(name: str) -> str:
            for begin, other in (names or {}).items():
                if name.startswith(begin):
                    return other + name.removeprefix(begin)
            return name

        stored = {renamed(name): tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(stored, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.config | config), encoding="utf-8")
        return directory

    def save_speculators(self, directory: Path, kind: str = "eagle3", **config: Any) -> Path:
        """The layout of speculators: the layer's config stands inside."""
        inner, self.config = self.config, {}
        try:
            return self.save(
                directory,
                speculators_model_type=kind,
                transformer_layer_config=inner,
                draft_vocab_size=self.draft_vocab,
                **config,
            )
        finally:
            self.config = inner

    def matrix(self, name: str, rows: int, columns: int) -> None:
        self.tensors[name] = torch.randn(rows, columns, generator=self.generator) * columns**-0.5

    def vector(self, name: str, size: int, centre: float = 1.0) -> None:
        self.tensors[name] = centre + 0.2 * torch.randn(size, generator=self.generator)

    def _ends(self, own: bool) -> None:
        if own:
            self.matrix("embed_tokens.weight", self.vocab, HIDDEN)
        if own or self.draft_vocab < self.vocab:
            self.matrix("lm_head.weight", self.draft_vocab, HIDDEN)
        if self.draft_vocab < self.vocab:
            kept = torch.randperm(self.vocab, generator=self.generator)[: self.draft_vocab].sort().values
            self.tensors["d2t"] = kept - torch.arange(self.draft_vocab)
            mask = torch.zeros(self.vocab, dtype=torch.bool)
            mask[kept] = True
            self.tensors["t2d"] = mask

    def _layer(self, index: int, bias: bool, qk_norm: bool, inner: int) -> None:
        prefix = f"layers.{index}."
        sizes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (inner, HIDDEN),
            "mlp.up_proj": (inner, HIDDEN),
            "mlp.down_proj": (HIDDEN, inner),
        }
        for name, (rows, columns) in sizes.items():
            self.matrix(f"{prefix}{name}.weight", rows, columns)
            if bias and name[-6] in "qkv" and "self_attn" in name:
                self.vector(f"{prefix}{name}.bias", rows, 0.0)
        if qk_norm:
            for name in "qk":
                self.vector(f"{prefix}self_attn.{name}_norm.weight", HEAD_DIM)
        self.vector(prefix + "post_attention_layernorm.weight", HIDDEN)
        if index:
            self.vector(prefix + "input_layernorm.weight", HIDDEN)
