"""Models with random weights: their passes cost as much as those of trained models."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from foreword.backends.torch.weights import DecoderWeights, weights_from
from foreword.backends.weight_loader import stacked
from foreword.errors import RequestError
from foreword.models.config import (
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    LinearRopeScaling,
    MlpSpec,
    ModelConfig,
    Norms,
    NormSpec,
    Recurrence,
    RecurrentSpec,
    RopeSpec,
)
from foreword.models.formats.checkpoint import QuantizedTensor, open_checkpoint, row_pieces
from foreword.models.heads.writing import layer_config
from foreword.models.layer_shapes import expected_shapes
from foreword.models.tokenization.tokenizer import Tokenizer


def _shape(
    architecture: str, vocab: int, hidden: int, layers: list[LayerSpec], rope: RopeSpec, tied: bool = False
) -> ModelConfig:
    norm = NormSpec(1e-5)
    return ModelConfig(architecture, vocab, hidden, 131_072, tuple(layers), norm, rope, tied_embeddings=tied)


def _llama(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, dim: int, tied: bool
) -> ModelConfig:
    layer = LayerSpec(AttentionSpec(heads, kv_heads, dim), MlpSpec(mlp))
    return _shape("llama", vocab, hidden, [layer] * layers, RopeSpec(500_000.0), tied)


def _qwen2_small() -> ModelConfig:
    """Qwen2.5 1.5B."""
    layer = LayerSpec(AttentionSpec(12, 2, 128, bias=True), MlpSpec(8960))
    return _shape("qwen2", 151_936, 1536, [layer] * 28, RopeSpec(1e6), tied=True)


def _gemma3() -> ModelConfig:
    """Gemma 3 12B: every sixth layer sees all positions."""
    attention = AttentionSpec(16, 8, 256, qk_norm=True, scale=256**-0.5)
    local = replace(attention, window=1024, rope=RopeSpec(1e4))
    mlp = MlpSpec(15_360, activation="gelu_pytorch_tanh")
    layers = [LayerSpec(attention if index % 6 == 5 else local, mlp, Norms.AROUND) for index in range(48)]
    shape = _shape("gemma3", 262_208, 3840, layers, RopeSpec(1e6, LinearRopeScaling(8.0)), tied=True)
    return replace(shape, embedding_scale=3840**0.5)


def _qwen3_moe() -> ModelConfig:
    """Qwen3-30B-A3B."""
    mlp = MlpSpec(0, experts=ExpertsSpec(128, 8, 768, normalize=True))
    layer = LayerSpec(AttentionSpec(32, 4, 128, qk_norm=True), mlp)
    return _shape("qwen3_moe", 151_936, 2048, [layer] * 48, RopeSpec(1e6))


def _deepseek_v2_lite() -> ModelConfig:
    latent = LatentSpec(kv_rank=512, query_rank=None, nope_dim=128, rope_dim=64, value_dim=128)
    attention = AttentionSpec(16, 16, 192, latent=latent)
    mixture = LayerSpec(attention, MlpSpec(2816, experts=ExpertsSpec(64, 6, 1408)))
    layers = [LayerSpec(attention, MlpSpec(10_944)), *[mixture] * 26]
    return _shape("deepseek_v2", 102_400, 2048, layers, RopeSpec(500_000.0))


def _gpt_oss() -> ModelConfig:
    """gpt-oss-20b: every second layer sees all positions."""
    attention = AttentionSpec(64, 8, 64, bias=True, output_bias=True, sinks=True)
    mlp = MlpSpec(0, experts=ExpertsSpec(32, 4, 2880, normalize=True, bias=True, clamp=7.0))
    local, full = LayerSpec(replace(attention, window=128), mlp), LayerSpec(attention, mlp)
    return _shape("gpt_oss", 201_088, 2880, [local, full] * 12, RopeSpec(150_000.0))


def _hybrid(
    vocab: int, hidden: int, heads: int, kv_heads: int, mlp: MlpSpec, layers: int, value_heads: int = 32
) -> ModelConfig:
    """Qwen3.5 and Qwen3-Next: the gated delta rule in three of four layers."""
    delta = RecurrentSpec(
        Recurrence.DELTA, kernel=4, heads=value_heads, value_dim=128, key_heads=16, key_dim=128
    )
    attention = LayerSpec(AttentionSpec(heads, kv_heads, 256, qk_norm=True, gated=True), mlp)
    recurrent = replace(attention, recurrent=delta)
    four = [recurrent, recurrent, recurrent, attention]
    return _shape("qwen3_5", vocab, hidden, four * (layers // 4), RopeSpec(1e7, rotary_dim=64))


def _lfm2() -> ModelConfig:
    """LFM2 1.2B: short convolutions, and attention in six layers."""
    attention = LayerSpec(AttentionSpec(32, 8, 64, qk_norm=True), MlpSpec(8192))
    short = replace(attention, recurrent=RecurrentSpec(Recurrence.NONE, kernel=3, heads=1, value_dim=2048))
    layers = [attention if index in (2, 5, 8, 10, 12, 14) else short for index in range(16)]
    return _shape("lfm2", 65_536, 2048, layers, RopeSpec(1e6), tied=True)


_QUARTER_OF_EXPERTS = ExpertsSpec(128, 10, 512, normalize=True, shared_gate=True)
"""A quarter of the experts of Qwen3-Next 80B-A3B, which fit into one GPU's memory."""

SHAPES = {
    "llama-8b": _llama(128_256, 4096, 14_336, 32, 32, 8, 128, tied=False),
    "llama-1b": _llama(128_256, 2048, 8192, 16, 32, 8, 64, tied=True),
    "qwen2.5-1.5b": _qwen2_small(),
    "smollm2-135m": _llama(49_152, 576, 1536, 30, 9, 3, 64, tied=True),
    "gemma-3-12b": _gemma3(),
    "qwen3-30b-a3b": _qwen3_moe(),
    "deepseek-v2-lite": _deepseek_v2_lite(),
    "gpt-oss-20b": _gpt_oss(),
    "qwen3.5-0.8b": replace(_hybrid(248_320, 1024, 8, 2, MlpSpec(3584), 24, 16), tied_embeddings=True),
    "lfm2-1.2b": _lfm2(),
    "qwen3.5-9b": _hybrid(248_320, 4096, 16, 4, MlpSpec(12_288), 32),
    "qwen3-next-22b-a3b": _hybrid(151_936, 2048, 16, 2, MlpSpec(512, experts=_QUARTER_OF_EXPERTS), 48),
}


def named_shape(name: str) -> ModelConfig:
    """Return the shape with this name in `SHAPES`, or the shape of the checkpoint at this path."""
    if name in SHAPES:
        return SHAPES[name]
    if Path(name).exists():
        return open_checkpoint(Path(name)).config
    raise RequestError(f"no shape {name!r}; use {', '.join(SHAPES)} or the path of a model")


def draft_shape(target: ModelConfig) -> ModelConfig:
    """Return the shape of a small draft model for the target."""
    return replace(SHAPES["llama-1b"], vocab_size=target.vocab_size)


class RandomTensors:
    """Creates random tensors by name. They have the scale of trained ones, so that activations stay finite."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        gain_of: Callable[[int], float] = lambda layer: 1.0,
    ) -> None:
        """Create a source of tensors; `gain_of(layer)` scales a layer's contribution to the residual stream."""
        self.hidden_size = config.hidden_size
        self.shapes = expected_shapes(config)
        self._generator = torch.Generator(device).manual_seed(0)
        self._dtype, self._device, self._gain_of = dtype, device, gain_of
        self._is_mixture = any(layer.mlp.experts for layer in config.layers)

    def tensor(self, name: str) -> Tensor:
        """Return a random matrix; of vectors, norms are ones and biases zeros."""
        numbers = self.nothing(*self.shapes[name])
        if numbers.ndim == 1:
            return numbers.fill_(float(name.endswith("norm.weight")))
        gain = self._gain_of(_layer_of(name)) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        if self._is_mixture and name == "model.embed_tokens.weight":
            gain = numbers.shape[1] ** 0.5  # large, so that different tokens take different experts
        return numbers.normal_(0.0, gain * numbers.shape[1] ** -0.5, generator=self._generator)

    def matrix(self, names: Sequence[str]) -> Tensor:
        return stacked([self.tensor(name) for name in names])

    def floats(self, name: str) -> Tensor:
        return self.tensor(name).float()

    def nothing(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(shape, dtype=self._dtype, device=self._device)


class RandomMxfp4(RandomTensors):
    """Random tensors with experts in MXFP4, like published gpt-oss models."""

    def experts(self, names: Sequence[Sequence[str]]) -> object:
        from foreword.backends.cuda.expert_packing import GROUP, pack

        rows, columns = self.shapes[names[0][0]]
        shape = len(names), columns // GROUP, rows * len(names[0])
        codes = torch.empty((*shape, GROUP // 2), dtype=torch.uint8, device=self._device)
        codes.random_(256, generator=self._generator)
        # A power of two, biased by 127. Random 4-bit numbers have the root mean square 3, weights columns**-0.5.
        scale = 128 - round(math.log2(columns**0.5 * 6))
        return pack(codes, torch.full(shape, scale, dtype=torch.uint8, device=self._device), self._dtype)


def packed_weights(config: ModelConfig, device: torch.device, quantization: str) -> DecoderWeights[Any]:
    """Return random bf16 weights, whose layer matrices are quantised as --quantization says."""
    as_published = quantization == "auto" and config.architecture == "gpt_oss"
    source = (RandomMxfp4 if as_published else RandomTensors)(config, torch.bfloat16, device)
    if quantization in ("auto", "none"):
        return weights_from(source, config)
    from foreword.backends.cuda.packing import RoundedMatrices

    return weights_from(RoundedMatrices(source, quantization), config)


EXPERTS_USED = 2  # experts per token of a mixture


class RandomCheckpoint:
    """A checkpoint of random weights that keep the residual stream bounded; it has no tokenizer."""

    def __init__(self, config: ModelConfig, blocks: Mapping[str, QuantizedTensor] | None = None) -> None:
        """Create a checkpoint; `blocks` are quantised tensors by name."""
        self.config = config
        self.path = Path("random numbers")
        self._shapes = expected_shapes(config)
        self._seeds = {name: seed for seed, name in enumerate(sorted(self._shapes))}
        self._blocks = blocks or {}

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the same numbers every time."""
        shape = self._shapes[name]
        values = torch.randn(shape, generator=torch.Generator().manual_seed(self._seeds[name]))
        return (1 + 0.1 * values if len(shape) == 1 else values * shape[1] ** -0.5).to(dtype)

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        yield from row_pieces(self.load(name, dtype), rows)

    def quantized(self, name: str) -> QuantizedTensor | None:
        return self._blocks.get(name)

    def release(self) -> None:
        pass

    def sampling_defaults(self) -> dict[str, float]:
        return {}

    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError


def as_mixture(config: ModelConfig, experts: int) -> ModelConfig:
    """Return a dense model's shape with experts; the experts of one token together are as wide as its MLP."""
    if not EXPERTS_USED < experts <= 1024:
        raise RequestError(f"a mixture has {EXPERTS_USED + 1} .. 1024 experts, not {experts}")
    return replace(config, layers=tuple(_with_experts(layer, experts) for layer in config.layers))


def _with_experts(layer: LayerSpec, count: int) -> LayerSpec:
    if layer.mlp.experts is not None:
        raise RequestError("the model has experts already; give a dense one")
    size = layer.mlp.intermediate_size // EXPERTS_USED
    experts = ExpertsSpec(count, EXPERTS_USED, size, normalize=True)
    return replace(layer, mlp=MlpSpec(0, activation=layer.mlp.activation, experts=experts))


QUIET = 0.02  # gain of the target's layers that its draft does not have, so that both agree
_END = "<|end|>"


def write_random_pair(config: ModelConfig, draft_layers: int, folder: Path) -> tuple[Path, Path]:
    """Write a random target, and its first `draft_layers` layers as a draft model; return their directories."""
    tensors = _tensors(config, lambda layer: 1.0 if layer < draft_layers else QUIET)
    target, draft = folder / "target", folder / "draft"
    _write(target, config, len(config.layers), tensors)
    of_draft = {name: tensor for name, tensor in tensors.items() if _layer_of(name) < draft_layers}
    _write(draft, config, draft_layers, of_draft)
    return target, draft


def write_agreeing_pair(
    target: ModelConfig, draft: ModelConfig, agreement: float, folder: Path
) -> tuple[Path, Path]:
    """Write two models that predict the same next token after this fraction of tokens; return their directories.

    The next token depends on the newest token only: the embedding dominates all layers, and the output matrix maps it
    to the next token.
    """
    size = target.vocab_size
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(size, generator=generator)
    follows = torch.empty_like(order)  # next token by newest token
    follows[order] = order.roll(-1)  # one cycle through all tokens, so that texts contain all of them
    wrong = torch.randperm(size, generator=generator)[: round((1 - agreement) * size)]
    drafted = follows.clone()
    drafted[wrong] = follows[wrong].roll(1)
    for name, config, next_tokens in (("target", target, follows), ("draft", draft, drafted)):
        untied = replace(config, vocab_size=size, tied_embeddings=False)
        tensors = _tensors(untied, lambda layer: QUIET)
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"][next_tokens] = embedding
        embedding *= config.hidden_size**0.5
        _write(folder / name, untied, len(config.layers), tensors)
    return folder / "target", folder / "draft"


def _layer_of(name: str) -> int:
    """Return a tensor's layer; -1: none."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def _tensors(config: ModelConfig, gain_of: Callable[[int], float]) -> dict[str, Tensor]:
    """Return random bf16 tensors in host memory, by name; see `RandomTensors` for `gain_of`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = RandomTensors(config, torch.bfloat16, device, gain_of)
    return {name: source.tensor(name).cpu() for name in source.shapes}


def _write(path: Path, config: ModelConfig, layers: int, tensors: dict[str, Tensor]) -> None:
    described = layer_config(config, num_layers=layers) | {
        "max_position_embeddings": 8192,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "bfloat16",
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    _tokenizer(config.vocab_size).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END}), encoding="utf-8")


def _tokenizer(size: int) -> HfTokenizer:
    """Return a tokenizer of `size` tokens: the bytes, tokens with the texts <0>, <1>, ..., and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<{number}>" for number in range(size - len(alphabet) - 1)), _END]
    tokenizer = HfTokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return tokenizer
