"""Trainable decoder layers by Hugging Face names, for `draft` and `exit`.

Both draft token by token. If all earlier draft tokens are right, the state equals that of reading the text itself. So
one causal pass over the text yields every draft token: token s of tail row i is made at row i + s + 1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from foreword.backends.torch.norms import rms_norm
from foreword.models.config import FrequencyFactors, ModelConfig
from foreword.models.layer_shapes import expected_shapes
from foreword.models.rope import inverse_frequencies
from foreword.train.heads.learner import Learner
from foreword.train.passes.layers import LayerHalves, layer_tensors, rotation_of, run_layers, tracked
from foreword.train.passes.packing import PackedBatch
from foreword.train.passes.target import FrozenTarget
from foreword.train.passes.vocabulary import HeadVocabulary

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
_RESIDUAL_WRITERS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


class LayerStack(Learner):
    """Layers with a final norm; embedding and output matrix may be the target's."""

    def __init__(
        self,
        target: FrozenTarget,
        vocabulary: HeadVocabulary,
        config: ModelConfig,
        *,
        taps: tuple[int, ...] = (),
        compiled: bool = False,
    ) -> None:
        super().__init__(target, vocabulary, taps)
        self.config = config
        shapes = {name: shape for name, shape in expected_shapes(config).items() if self._learns(name)}
        is_matrix = {name: len(shape) == 2 and name != EMBEDDING for name, shape in shapes.items()}

        def parameters(wanted: bool) -> nn.ParameterDict:
            # Parameter names must not contain dots.
            names = [name for name, shape in shapes.items() if is_matrix[name] is wanted]
            return nn.ParameterDict({_key(name): nn.Parameter(torch.zeros(shapes[name])) for name in names})

        self.matrices = parameters(True)
        self.vectors = parameters(False)
        self._frequencies = inverse_frequencies(config).to(target.device)
        self._plain, self._halves = LayerHalves(compiled=False), LayerHalves(compiled=compiled, dynamic=False)

    def _learns(self, name: str) -> bool:
        """Whether a tensor of the config is trained here."""
        return name not in (EMBEDDING, "lm_head.weight")

    def loss_steps(self, depth: int) -> int:
        """Return 1: later draft tokens are the same function of later rows."""
        return 1

    def output(self, step: int) -> Tensor:
        return self.target.weights.head

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights by Hugging Face names."""
        return {_name(key): value for key, value in (*self.matrices.items(), *self.vectors.items())}

    @torch.no_grad()
    def begin_random(self, seed: int) -> None:
        """Initialise norms with 1 and small matrices, so that layers start near identity."""
        generator = torch.Generator().manual_seed(seed)
        depth = self.config.num_layers
        for name, tensor in self.weights().items():
            if tensor.ndim == 1:
                tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            scale = 1 / (2 * depth) ** 0.5 if name.endswith(_RESIDUAL_WRITERS) else 1.0
            width = 1 if name == EMBEDDING else tensor.shape[1]
            size = 0.02 if name == EMBEDDING else 0.5 * scale / width**0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * size)

    @torch.no_grad()
    def copy_layer(self, source: int, place: int) -> None:
        """Copy one of the target's layers."""
        layer, spec = self.target.weights.layers[source], self.target.attention
        mlp = self.config.layer.mlp.intermediate_size
        widths = [spec.query_width, spec.kv_width, spec.kv_width]
        parts: dict[str, Tensor | None] = {
            "input_layernorm.weight": layer.input_norm,
            "post_attention_layernorm.weight": layer.mlp_norm,
            "self_attn.q_norm.weight": layer.query_norm,
            "self_attn.k_norm.weight": layer.key_norm,
            "self_attn.o_proj.weight": layer.output,
            "self_attn.o_proj.bias": layer.output_bias,
            "mlp.down_proj.weight": layer.down,
            "mlp.down_proj.bias": layer.down_bias,
        }
        for kind, qkv, gate_up in (
            ("weight", layer.qkv, layer.gate_up),
            ("bias", layer.qkv_bias, layer.gate_up_bias),
        ):
            if qkv is not None:
                names = [f"self_attn.{name}_proj.{kind}" for name in "qkv"]
                parts |= dict(zip(names, torch.split(qkv, widths), strict=True))
            if gate_up is not None:
                names = [f"mlp.{name}_proj.{kind}" for name in ("gate", "up")]
                parts |= dict(zip(names, torch.split(gate_up, mlp), strict=True))
        own = self.weights()
        for name, tensor in parts.items():
            if tensor is not None:
                own[f"model.layers.{place}.{name}"].copy_(tensor)

    def run(self, stream: Tensor, batch: PackedBatch, weights: Mapping[str, Tensor]) -> Tensor:
        """Run the layers and the final norm over all rows; `weights` are cast."""
        spec, eps = self.config.layer.attention, self.config.norm.eps
        layers = [layer_tensors(weights, f"model.layers.{i}.") for i in range(self.config.num_layers)]
        stream = run_layers(
            self._halves if torch.is_grad_enabled() else self._plain,
            tracked(stream) if len(layers) > 1 else stream,
            rotation_of(batch.positions, self._frequencies, stream.dtype),
            batch.texts,
            layers,
            (spec.num_heads, spec.num_kv_heads, spec.head_dim),
            eps,
        )
        return rms_norm(stream, weights[NORM], eps)

    def cast(self) -> dict[str, Tensor]:
        """Return all weights in the target's dtype; gradients flow through."""
        return {name: tensor.to(self.target.dtype) for name, tensor in self.weights().items()}


def states_by_level(states: Tensor, batch: PackedBatch, count: int) -> Iterator[Tensor]:
    """Yield the states of every draft token from one pass over the text."""
    for step in range(count):
        yield states[(batch.tail_rows + step + 1).clamp(max=len(states) - 1)]


def without_factors(config: ModelConfig) -> ModelConfig:
    """Return a config that config.json can express: GGUF's rotary factors have no key there."""
    if isinstance(config.rope.scaling, FrequencyFactors):
        return replace(config, rope=replace(config.rope, scaling=None))
    return config


def _key(name: str) -> str:
    return name.replace(".", "/")


def _name(key: str) -> str:
    return key.replace("/", ".")
