"""The decoder's tensors, checked one by one while they are loaded."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.progress import Progress


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Projections that read the same input are stored as one matrix."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [query_width + 2 * kv_width, hidden]
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, query_width]
    output_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    """All tensors of a decoder."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself when tied


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config must have."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (config.query_width, hidden, config.attention_bias),
        "self_attn.k_proj": (config.kv_width, hidden, config.attention_bias),
        "self_attn.v_proj": (config.kv_width, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, config.query_width, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        for name, (rows, columns, bias) in linears.items():
            shapes[prefix + name + ".weight"] = (rows, columns)
            if bias:
                shapes[prefix + name + ".bias"] = (rows,)
    return shapes


def check_names(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that leaves a weight unfilled or brings one that the decoder would ignore."""
    present = checkpoint.tensor_names()
    expected = expected_shapes(checkpoint.config)
    ignorable = {"lm_head.weight"} if checkpoint.config.tied_embeddings else set()
    ignorable |= {name for name in present if name.endswith("rotary_emb.inv_freq")}
    missing = sorted(expected.keys() - present)
    surplus = sorted(present - expected.keys() - ignorable)
    for what, names in (("lacks", missing), ("has unknown", surplus)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{checkpoint.path} {what} tensor {names[0]}{more}: "
                "it does not fit its own config; get the files again or pick another model"
            )


class WeightLoader:
    """Loads tensors by name in one dtype onto one device, checking shapes and counting progress."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        check_names(checkpoint)
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._shapes = expected_shapes(checkpoint.config)
        self._progress = progress
        self._done = 0

    def tensor(self, name: str) -> Tensor:
        """One tensor."""
        loaded = self._checkpoint.load(name, self._dtype)
        self.check_shape(name, tuple(loaded.shape))
        self.check_finite(name, bool(loaded.sum(dtype=torch.float32).isfinite()))
        self.count()
        return loaded.to(self._device)

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that the config does not describe."""
        if shape != self._shapes[name]:
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {name} has shape {shape}, "
                f"its config says {self._shapes[name]}; get the files again"
            )

    def check_finite(self, name: str, is_finite: bool) -> None:
        """Refuse a tensor with NaN or infinity in it: every answer would fail, in any numbers."""
        if not is_finite:
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {name} holds NaN or infinity; the file is damaged, get it again"
            )

    def count(self) -> None:
        """One more tensor is done."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self._shapes))

    def stacked(self, prefix: str, names: tuple[str, ...], kind: str) -> Tensor:
        """Several projections as one matrix."""
        parts = [self.tensor(f"{prefix}{name}.{kind}") for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    ends: DecoderWeights | None = None,
) -> DecoderWeights:
    """Read a whole decoder; `ends` lends its embedding, head and last norm."""
    config = checkpoint.config
    loader = WeightLoader(checkpoint, dtype, device, progress)
    weights = _load_ends(loader, config) if ends is None else ends
    layers = tuple(_load_layer(loader, config, f"model.layers.{i}.") for i in range(config.num_layers))
    return replace(weights, layers=layers)


def _load_ends(loader: WeightLoader, config: ModelConfig) -> DecoderWeights:
    embedding = loader.tensor("model.embed_tokens.weight")
    head = embedding if config.tied_embeddings else loader.tensor("lm_head.weight")
    return DecoderWeights(embedding, (), loader.tensor("model.norm.weight"), head)


def _load_layer(loader: WeightLoader, config: ModelConfig, prefix: str) -> LayerWeights:
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output, gate_up, down = ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)

    def bias(names: tuple[str, ...], wanted: bool) -> Tensor | None:
        return loader.stacked(prefix, names, "bias") if wanted else None

    def head_norm(name: str) -> Tensor | None:
        return loader.tensor(f"{prefix}self_attn.{name}.weight") if config.qk_norm else None

    return LayerWeights(
        input_norm=loader.tensor(prefix + "input_layernorm.weight"),
        qkv=loader.stacked(prefix, qkv, "weight"),
        qkv_bias=bias(qkv, config.attention_bias),
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=loader.stacked(prefix, output, "weight"),
        output_bias=bias(output, config.output_bias),
        mlp_norm=loader.tensor(prefix + "post_attention_layernorm.weight"),
        gate_up=loader.stacked(prefix, gate_up, "weight"),
        gate_up_bias=bias(gate_up, config.mlp_bias),
        down=loader.stacked(prefix, down, "weight"),
        down_bias=bias(down, config.mlp_bias),
    )
