"""Early exits for tiny models that nobody trained: the target's last layer, with noise."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_exit(target: Path, out: Path, layer: int, noise: float = 0.02) -> Path:
    """An exit after so many layers, in the layout of `foreword train exit`."""
    config = json.loads((target / "config.json").read_text())
    stored, generator = load_file(target / "model.safetensors"), torch.Generator().manual_seed(1)
    last, own = f"model.layers.{config['num_hidden_layers'] - 1}.", {}
    for name, tensor in stored.items():
        if name.startswith(last) or name == "model.norm.weight":
            spoilt = tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
            own[name.replace(last, "model.layers.0.")] = spoilt.to(tensor.dtype)
    out.mkdir(parents=True)
    save_file(own, out / "model.safetensors", {"format": "pt"})
    changed = {"num_hidden_layers": 1, "exit_layer": layer, "layer_types": None}
    (out / "config.json").write_text(json.dumps(config | changed))
    return out
