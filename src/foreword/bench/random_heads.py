"""Draft heads with random weights in published sizes: they cost as much as trained heads."""

import atexit
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from foreword.backends.interface import Decoder
from foreword.backends.torch.head_factory import TorchHeads
from foreword.backends.torch.weights import DecoderWeights
from foreword.drafters.heads.dflash import DependentBlockHead, DFlashHead, DSparkHead
from foreword.drafters.heads.eagle import PEagleHead, StepwiseHead
from foreword.drafters.heads.loading import DraftVocabulary, LoadedHead, taps_of
from foreword.drafters.heads.medusa import MedusaDrafter
from foreword.errors import RequestError
from foreword.kv.spec import RowSpec
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from foreword.models.heads.names import all_layer_shapes
from foreword.models.heads.opening import Head, open_head
from foreword.models.heads.published import MASK_HIDDEN
from foreword.models.heads.spec import CONVOLUTIONS, DRAFTER_TENSORS, MARKOV, SELECTOR
from foreword.models.heads.writing import head_sizes, layer_config
from foreword.speculation.drafting import Drafter

MEDUSA_HEADS, DFLASH_LAYERS, DFLASH_BLOCK, DRAFT_VOCAB, TAPS = 5, 5, 16, 32_000, 3
"""Published sizes: Medusa heads, DFlash layers and block, reduced vocabulary, taps."""

DSPARK_BLOCK, DSPARK_RANK = 7, 256  # DSpark's block size and Markov rank

DFLASH2_TAPS, DFLASH2_GROUP, DFLASH2_RANK = 2, 16, 256
"""Taps and channel groups of DFlash2's convolutions, and its selector's rank."""

Shaped = tuple[dict[str, tuple[int, ...]], dict[str, Any]]  # shapes of tensors by name, and the config


def write_random_head(method: str, target: ModelConfig, path: Path) -> Path:
    """Write a head of this method for this target into a new directory."""
    if method not in _SHAPES:
        known = ", ".join(_SHAPES)
        raise RequestError(f"--methods: there is no random model for {method!r}, only for {known}")
    shapes, config = _SHAPES[method](_plain(target))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.02).bfloat16() for name, shape in shapes.items()
    }
    if config.get("draft_vocab_size", target.vocab_size) < target.vocab_size:
        tensors["d2t"] = torch.zeros(config["draft_vocab_size"], dtype=torch.int64)
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def _plain(target: ModelConfig) -> ModelConfig:
    """Return the target's config with Llama's layers, which heads have.

    An MLP takes the place of a mixture, as wide as the experts that one token uses.
    """
    heads, kv_heads, head_dim, intermediate = head_sizes(target)
    layer = LayerSpec(AttentionSpec(heads, kv_heads, head_dim), MlpSpec(intermediate))
    return replace(target, layers=(layer,) * target.num_layers)


def _layers(target: ModelConfig, layers: int, inputs: int = 1) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of this many layers like the target's; the first reads `inputs` hidden states."""
    hidden = target.hidden_size
    return all_layer_shapes((target.layer,) * layers, hidden, first_inputs=inputs * hidden, first_norm=True)


def _eagle(target: ModelConfig) -> Shaped:
    shapes = _layers(target, 1) | {"fc.weight": (target.hidden_size, 2 * target.hidden_size)}
    del shapes["layers.0.input_layernorm.weight"]
    return shapes, layer_config(target)


def _eagle3(target: ModelConfig) -> Shaped:
    hidden, draft_vocab = target.hidden_size, min(DRAFT_VOCAB, target.vocab_size)
    shapes = _layers(target, 1, inputs=2) | {
        "fc.weight": (hidden, TAPS * hidden),
        "layers.0.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }
    middle = max(target.num_layers // 2, 1)
    layers = [min(2, middle), middle, max(target.num_layers - 3, middle)]
    settings = {"draft_vocab_size": draft_vocab, "eagle_aux_hidden_state_layer_ids": layers}
    return shapes, layer_config(target) | settings


def _p_eagle(target: ModelConfig) -> Shaped:
    shapes, config = _eagle3(target)
    return shapes | {MASK_HIDDEN: (1, 1, TAPS * target.hidden_size)}, config | {"mask_token_id": 0}


def _mtp(target: ModelConfig) -> Shaped:
    hidden = target.hidden_size
    module = {name.removeprefix("layers.0."): shape for name, shape in _layers(target, 1).items()}
    module |= {"eh_proj.weight": (hidden, 2 * hidden)}
    module |= {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes = {f"model.layers.{target.num_layers}.{name}": shape for name, shape in module.items()}
    return shapes, layer_config(target)


def _medusa(target: ModelConfig) -> Shaped:
    hidden, shapes = target.hidden_size, dict[str, tuple[int, ...]]()
    for head in range(MEDUSA_HEADS):
        shapes[f"medusa_head.{head}.0.linear.weight"] = (hidden, hidden)
        shapes[f"medusa_head.{head}.0.linear.bias"] = (hidden,)
        shapes[f"medusa_head.{head}.1.weight"] = (target.vocab_size, hidden)
    return shapes, {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": 1}


def _dflash(target: ModelConfig) -> Shaped:
    hidden, layers = target.hidden_size, min(DFLASH_LAYERS, target.num_layers)
    shapes = _layers(target, layers) | {
        "fc.weight": (hidden, TAPS * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    ids = [0, target.num_layers // 2, target.num_layers - 1]
    settings = {"mask_token_id": 0, "target_layer_ids": ids, "block_size": DFLASH_BLOCK}
    return shapes, layer_config(target, num_layers=layers) | {"dflash_config": settings}


def _dspark(target: ModelConfig) -> Shaped:
    shapes, config = _dflash(target)
    markov = {f"{name}.weight": (target.vocab_size, DSPARK_RANK) for name in MARKOV}
    block = {**config["dflash_config"], "block_size": DSPARK_BLOCK}
    return shapes | markov, config | {"dflash_config": block}


def _dflash2(target: ModelConfig) -> Shaped:
    shapes, config = _dflash(target)
    hidden, rank = target.hidden_size, DFLASH2_RANK
    convolution = {
        "base_kernel": (2, DFLASH2_TAPS, hidden),
        "kernel_projection.weight": (2 * DFLASH2_TAPS * hidden // DFLASH2_GROUP, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        for module in CONVOLUTIONS:
            shapes |= {f"layers.{layer}.{module}.{name}": shape for name, shape in convolution.items()}
    vectors = dict.fromkeys(SELECTOR[:2], (target.vocab_size, rank))
    return shapes | vectors | {SELECTOR[2]: (rank, hidden)}, config


_SHAPES: Mapping[str, Callable[[ModelConfig], Shaped]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "p_eagle": _p_eagle,
    "mtp": _mtp,
    "medusa": _medusa,
    "dflash": _dflash,
    "dflash2": _dflash2,
    "dspark": _dspark,
}


# Kinds of heads that `bench gpu --heads` measures.
METHODS = ("eagle3", "p_eagle", "dflash", "dflash2", "dspark", "medusa")


def random_head(decoder: Decoder, method: str) -> Head:
    """Return a random head of this method for the decoder; its weights stay in a file until the process ends."""
    folder = TemporaryDirectory(prefix="foreword-heads-")
    atexit.register(folder.cleanup)
    path = write_random_head(method, decoder.config, Path(folder.name) / method)
    return open_head(path).fitted(decoder.config)


def head_drafter(decoder: Decoder, head: Head, is_reference: bool = False) -> Drafter:
    """Return a drafter of chains with this head; `is_reference` runs the head in plain torch."""
    method, spec = head.spec.kind, head.spec
    vocabulary = DraftVocabulary(head.token_ids, decoder.config.vocab_size, decoder.device)
    weights, heads = getattr(decoder, "weights", None), decoder.heads
    if is_reference and isinstance(weights, DecoderWeights):
        heads = TorchHeads(decoder.config, weights, bucketed=decoder.device.type == "cuda")
    if method == "medusa":
        return MedusaDrafter(heads.medusa(head), taps_of(spec)[0], vocabulary, width=1)
    loaded = LoadedHead(
        heads.head(head, method),
        RowSpec(method, len(spec.layers), *spec.layers[0].attention.kv_row_sizes),
        taps_of(spec),
        vocabulary,
        tensors={name: head.load(name).to(decoder.device) for name in DRAFTER_TENSORS if spec.has(name)},
    )
    if method == "dspark":
        return DSparkHead(loaded, 1, confidence=0.0)
    if method == "dflash2":
        return DependentBlockHead(loaded, 1)
    if method == "dflash":
        return DFlashHead(loaded, 1)
    return (PEagleHead if method == "p_eagle" else StepwiseHead)(loaded, 1)
