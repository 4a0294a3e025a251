"""LoRA adapters as PEFT writes them, of random numbers, and models with an adapter merged in."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foreword.backends.cpu.decoder import load_cpu_decoder
from foreword.backends.cpu.packing import FORMATS
from foreword.backends.interface import Decoder
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.models.adapters import CONFIG_FILE, MODULES, TENSOR_FILE, layer_modules, open_adapter
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec
from helpers.random_checkpoint import RandomCheckpoint

ADAPTED = ModelConfig(
    architecture="llama",
    vocab_size=128,
    hidden_size=96,
    context_length=512,
    layers=(LayerSpec(AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=20), MlpSpec(150)),) * 2,
    norm=NormSpec(1e-5),
    rope=RopeSpec(10000.0),
    tied_embeddings=True,
)
"""Widths that are no multiples of a vector, a panel or a group."""

ALL = tuple(name.rsplit(".", 1)[1] for name in MODULES)


def adapter_tensors(
    rank: int, modules: Sequence[str], seed: int = 0, config: ModelConfig = ADAPTED
) -> dict[str, Tensor]:
    """A and B of every layer; B is not zero, as it is before training."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for module, (outputs, inputs) in layer_modules(config, layer).items():
            if module.rsplit(".", 1)[1] in modules:
                prefix = f"base_model.model.model.layers.{layer}.{module}"
                down = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
                up = torch.randn(outputs, rank, generator=generator) * rank**-0.5
                tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    return tensors


def write_adapter(
    path: Path,
    rank: int = 4,
    modules: Sequence[str] = ALL,
    *,
    seed: int = 0,
    tensors: dict[str, Tensor] | None = None,
    **settings: Any,
) -> Path:
    """A folder as `PeftModel.save_pretrained` makes it; what it adds is half as large as what is there."""
    path.mkdir(parents=True, exist_ok=True)
    known = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank / 2,
        "target_modules": list(modules),
        "bias": "none",
    }
    (path / CONFIG_FILE).write_text(json.dumps(known | settings))
    save_file(adapter_tensors(rank, modules, seed) if tensors is None else tensors, path / TENSOR_FILE)
    return path


class MergedCheckpoint(RandomCheckpoint):
    """The random model with what an adapter adds in its matrices."""

    def __init__(self, adapter: Path, config: ModelConfig = ADAPTED) -> None:
        super().__init__(config)
        factors = open_adapter(adapter, config).factors
        self._added = {
            f"model.layers.{layer}.{module}.weight": found.up @ found.down
            for (layer, module), found in factors.items()
        }

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        base = super().load(name, torch.float32)
        return (base + self._added[name] if name in self._added else base).to(dtype)


def decoder_of(numbers: str, checkpoint: RandomCheckpoint | None = None, threads: int = 2) -> Decoder:
    """`torch`, or a form of the CPU kernels."""
    checkpoint = checkpoint or RandomCheckpoint(ADAPTED)
    if numbers == "torch":
        weights = load_weights(checkpoint, torch.float32, torch.device("cpu"))
        return TorchDecoder(checkpoint.config, weights)
    return load_cpu_decoder(checkpoint, FORMATS[numbers], threads=threads)
