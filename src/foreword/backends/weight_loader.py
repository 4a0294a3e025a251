"""A checkpoint's tensors, checked one by one while they are loaded; all backends read them through this."""

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.config import LayerSpec, ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.progress import Progress

FINAL_NORM = "model.norm.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config must have."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        FINAL_NORM: (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index, layer in enumerate(config.layers):
        shapes |= _layer_shapes(f"model.layers.{index}.", layer, hidden)
    return shapes


def _layer_shapes(prefix: str, layer: LayerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    attention, mlp = layer.attention, layer.mlp
    linears = {
        "self_attn.q_proj": (attention.query_width, hidden, attention.bias),
        "self_attn.k_proj": (attention.kv_width, hidden, attention.bias),
        "self_attn.v_proj": (attention.kv_width, hidden, attention.bias),
        "self_attn.o_proj": (hidden, attention.query_width, attention.output_bias),
        "mlp.gate_proj": (mlp.intermediate_size, hidden, mlp.bias),
        "mlp.up_proj": (mlp.intermediate_size, hidden, mlp.bias),
        "mlp.down_proj": (hidden, mlp.intermediate_size, mlp.bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        prefix + "input_layernorm.weight": (hidden,),
        prefix + "post_attention_layernorm.weight": (hidden,),
    }
    if attention.qk_norm:
        shapes[prefix + "self_attn.q_norm.weight"] = (attention.head_dim,)
        shapes[prefix + "self_attn.k_norm.weight"] = (attention.head_dim,)
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
