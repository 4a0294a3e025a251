"""Trains draft models and early exits, which consist of decoder layers.

Both draft token by token. A draft token counts in training only if all earlier draft tokens equal the text. Therefore
one causal pass over the text computes the states of all draft tokens: row i + s + 1 has the state of draft token s
(from 0 on) of tail row i. Tail rows are those after which a draft has a loss (`passes/packing.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from foreword.backends.support import require_plain
from foreword.backends.torch.norms import rms_norm
from foreword.errors import RequestError
from foreword.models.config import FrequencyFactors, LayerSpec, ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.layer_shapes import expected_shapes
from foreword.models.rope import frequencies
from foreword.train.heads.config_files import hf_settings, tokenizer_files
from foreword.train.heads.learner import (
    HeadVocabulary,
    LearnedFiles,
    Learner,
    by_file_name,
    parameters_by_name,
    stored,
)
from foreword.train.passes.attention import chain_attention
from foreword.train.passes.layers import LayerHalves, layer_tensors, rotation_of, tracked
from foreword.train.passes.packing import PackedBatch
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.passes.target import Features, FrozenTarget
from foreword.train.texts.documents import Document

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
# Matrices whose products are added to the residual stream.
_RESIDUAL_WRITERS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


class LayerStack(Learner):
    """Decoder layers with a final norm; embedding and output matrix may be the target's."""

    target: PlainTarget

    def __init__(
        self,
        target: PlainTarget,
        vocabulary: HeadVocabulary,
        config: ModelConfig,
        *,
        taps: tuple[int, ...] = (),
        compiled: bool = False,
    ) -> None:
        super().__init__(target, vocabulary, taps)
        self.config = config
        matrices: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}  # vectors, and the embedding, which the optimizer treats like a vector
        for name, shape in expected_shapes(config).items():
            if self._learns(name):
                is_matrix = len(shape) == 2 and name != EMBEDDING
                (matrices if is_matrix else others)[name] = torch.zeros(shape)
        self.matrices, self.vectors = parameters_by_name(matrices), parameters_by_name(others)
        self._frequencies = frequencies(config.rope, config.layer.attention.head_dim).to(target.device)
        self._halves = LayerHalves(compiled=compiled)

    def _learns(self, name: str) -> bool:
        """Return whether a tensor of the config is trained."""
        return name not in (EMBEDDING, "lm_head.weight")

    def loss_steps(self, depth: int) -> int:
        """Return 1: the second draft token of a row has the same state and label as the first of the next row."""
        return 1

    def output(self, step: int) -> Tensor:
        return self.target.weights.head

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights by Hugging Face names."""
        return by_file_name(self.matrices, self.vectors)

    @torch.no_grad()
    def begin_random(self, seed: int) -> None:
        """Set norms to 1 and draw small random matrices, so that each layer starts near identity."""
        generator = torch.Generator().manual_seed(seed)
        num_writes = 2 * self.config.num_layers  # to the residual stream: by attention and MLP of each layer
        for name, tensor in self.weights().items():
            if tensor.ndim == 1:
                tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            if name == EMBEDDING:
                deviation = 0.02
            else:
                scale = 1 / num_writes**0.5 if name.endswith(_RESIDUAL_WRITERS) else 1.0
                deviation = 0.5 * scale / tensor.shape[1] ** 0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation)

    @torch.no_grad()
    def copy_layer(self, source: int, index: int) -> None:
        """Copy layer `source` of the target to layer `index` of this stack."""
        layer, spec = self.target.weights.layers[source], self.target.attention
        intermediate = self.config.layer.mlp.intermediate_size
        widths = [spec.query_width, spec.kv_width, spec.kv_width]
        tensors: dict[str, Tensor | None] = {
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
                names = [f"self_attn.{name}_proj.{kind}" for name in ("q", "k", "v")]
                tensors |= dict(zip(names, torch.split(qkv, widths), strict=True))
            if gate_up is not None:
                names = [f"mlp.{name}_proj.{kind}" for name in ("gate", "up")]
                tensors |= dict(zip(names, torch.split(gate_up, intermediate), strict=True))
        weights = self.weights()
        for name, tensor in tensors.items():
            if tensor is not None:
                weights[f"model.layers.{index}.{name}"].copy_(tensor)

    def run(self, stream: Tensor, batch: PackedBatch, weights: Mapping[str, Tensor]) -> Tensor:
        """Run the layers and the final norm over all rows; `weights` have the stream's dtype."""
        spec, eps, texts = self.config.layer.attention, self.config.norm.eps, batch.texts
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        rotation = rotation_of(batch.positions, self._frequencies, stream.dtype)
        stream = tracked(stream) if self.config.num_layers > 1 else stream
        for index in range(self.config.num_layers):
            tensors = layer_tensors(weights, f"model.layers.{index}.")
            q, k, v = self._halves.before(stream, *rotation, tensors, sizes, eps)
            stream = self._halves.after(stream, chain_attention(q, k, v, [], texts, texts), tensors, eps)
        return rms_norm(stream, weights[NORM], eps)

    def cast(self) -> dict[str, Tensor]:
        """Return all weights in the target's dtype; gradients flow through."""
        return {name: tensor.to(self.target.dtype) for name, tensor in self.weights().items()}


def states_by_level(states: Tensor, batch: PackedBatch, count: int) -> Iterator[Tensor]:
    """Yield the states [tails, hidden] of each of `count` draft tokens, from one pass over the text."""
    for step in range(count):
        # Rows after the end of a text are not counted in the loss (`PackedBatch.predicted`).
        yield states[(batch.tail_rows + step + 1).clamp(max=len(states) - 1)]


def without_factors(config: ModelConfig) -> ModelConfig:
    """Return the config without GGUF's rotary factors, which config.json cannot express."""
    if isinstance(config.rope.scaling, FrequencyFactors):
        return replace(config, rope=replace(config.rope, scaling=None))
    return config


@dataclass(frozen=True)
class DraftRecipe:
    """Shape and initial weights of a draft model; sizes that are None are the target's."""

    layers: int = 4  # number of layers
    # Target layers with the initial weights; None: evenly spaced layers.
    copied: tuple[int, ...] | None = None
    random: bool = False  # initialise all layers randomly, instead of copying
    hidden: int | None = None  # width of the residual stream
    intermediate: int | None = None  # width of the MLP
    heads: int | None = None  # query heads
    kv_heads: int | None = None

    method: ClassVar[str] = "draft"
    draft_vocab: ClassVar[None] = None  # all tokens

    def check(self, target: ModelConfig) -> None:
        require_plain(target)
        self._copied(target, self._config(target))

    def build(self, target: FrozenTarget, vocabulary: HeadVocabulary, compiled: bool = False) -> Learner:
        config = self._config(target.config)
        copied = self._copied(target.config, config)
        assert isinstance(target, PlainTarget)  # see `check`
        return DraftModel(target, vocabulary, config, copied, compiled=compiled).to(target.device)

    def _config(self, target: ModelConfig) -> ModelConfig:
        """Return the draft model's config; raise `RequestError` if its sizes do not fit together."""
        attention, mlp = target.layer.attention, target.layer.mlp
        heads = self.heads or attention.num_heads
        # The target's number of KV heads need not divide another number of query heads.
        kv_heads = self.kv_heads or (heads if self.heads else attention.num_kv_heads)
        hidden = self.hidden or target.hidden_size
        head_dim = hidden // heads if self.hidden or self.heads else attention.head_dim
        if heads % kv_heads or hidden < heads or head_dim % 2:
            raise RequestError(
                f"{heads} query heads, {kv_heads} key/value heads and a width of {hidden} do not fit together"
            )
        attention = replace(attention, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        mlp = replace(mlp, intermediate_size=self.intermediate or mlp.intermediate_size)
        layer = LayerSpec(attention, mlp)
        count = self.layers if self.copied is None else len(self.copied)
        # A model of another width than the target has its own embedding, which is also its output matrix.
        is_tied = target.tied_embeddings or hidden != target.hidden_size
        layers = (layer,) * count
        return without_factors(replace(target, hidden_size=hidden, layers=layers, tied_embeddings=is_tied))

    def _copied(self, target: ModelConfig, config: ModelConfig) -> tuple[int, ...]:
        """Return the target's layers to copy; empty for random initial layers."""
        fits = config.layer == target.layer and config.hidden_size == target.hidden_size
        if self.random or not fits:
            if self.copied is not None:
                raise RequestError(
                    "layers can be copied only into a draft model of the target's own shape that is not random; "
                    "leave out the layers to copy, or the sizes and the random start"
                )
            return ()
        if self.copied is None:
            last, count = target.num_layers - 1, self.layers
            return tuple(round(i * last / max(count - 1, 1)) for i in range(count))  # evenly spaced
        if not all(0 <= layer < target.num_layers for layer in self.copied):
            raise RequestError(f"layers to copy must be within 0 .. {target.num_layers - 1}")
        return self.copied


class DraftModel(LayerStack):
    """A draft model. If it is as wide as the target, it uses the target's embedding and output matrix, frozen."""

    def __init__(
        self,
        target: PlainTarget,
        vocabulary: HeadVocabulary,
        config: ModelConfig,
        copied: tuple[int, ...],
        compiled: bool = False,
    ) -> None:
        self._shares_matrices = config.hidden_size == target.config.hidden_size
        self._copied = copied
        super().__init__(target, vocabulary, config, compiled=compiled)

    def _learns(self, name: str) -> bool:
        return super()._learns(name) or (name == EMBEDDING and not self._shares_matrices)

    @torch.no_grad()
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        self.begin_random(seed)
        for index, source in enumerate(self._copied):
            self.copy_layer(source, index)
        if self._shares_matrices:
            self.weights()[NORM].copy_(self.target.weights.final_norm)

    def output(self, step: int) -> Tensor:
        return self.target.weights.head if self._shares_matrices else self.weights()[EMBEDDING]

    def steps(self, batch: PackedBatch, features: Features, count: int) -> Iterator[Tensor]:
        weights = self.cast()
        table = self.target.weights.embedding if self._shares_matrices else weights[EMBEDDING]
        yield from states_by_level(self.run(embedding(batch.token_ids, table), batch, weights), batch, count)

    def files(self, checkpoint: Checkpoint, draft_tokens: int) -> LearnedFiles:
        """Return the files of a complete model, with copies of the target's matrices."""
        tensors = self.file_tensors()
        borrowed: dict[str, Tensor] = {}
        if self._shares_matrices:
            borrowed[EMBEDDING] = stored(self.target.weights.embedding)
            if not self.config.tied_embeddings:
                borrowed["lm_head.weight"] = stored(self.target.weights.head)
        tokenizer = checkpoint.tokenizer()
        return LearnedFiles(
            hf_settings(self.config, tokenizer),
            tensors | borrowed,
            tokenizer_files(tokenizer),
            frozenset(borrowed),
        )


@dataclass(frozen=True)
class ExitRecipe:
    """Settings of an early exit: the target's first layers, and one trained layer after them."""

    layer: int | None = None  # target layers before the exit; None: a quarter of them

    method: ClassVar[str] = "exit"
    draft_vocab: ClassVar[None] = None  # all tokens

    def check(self, target: ModelConfig) -> None:
        require_plain(target)
        self._layer(target)

    def build(self, target: FrozenTarget, vocabulary: HeadVocabulary, compiled: bool = False) -> Learner:
        layer = self._layer(target.config)
        assert isinstance(target, PlainTarget)  # see `check`
        return ExitAdapter(target, vocabulary, layer, compiled=compiled).to(target.device)

    def _layer(self, target: ModelConfig) -> int:
        count = target.num_layers
        layer = self.layer if self.layer is not None else max(1, count // 4)
        if not 1 <= layer < count:
            raise RequestError(f"the exit must be after layer 1 .. {count - 1}, not {layer}")
        return layer


class ExitAdapter(LayerStack):
    """One layer on the residual stream after the target's first layers, with the target's output matrix."""

    def __init__(
        self, target: PlainTarget, vocabulary: HeadVocabulary, layer: int, *, compiled: bool = False
    ) -> None:
        config = target.config.with_layers([layer])
        super().__init__(target, vocabulary, config, taps=(layer,), compiled=compiled)

    @torch.no_grad()
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        """Initialise the weights from the target's last layer."""
        self.copy_layer(self.target.config.num_layers - 1, 0)
        self.weights()[NORM].copy_(self.target.weights.final_norm)

    def steps(self, batch: PackedBatch, features: Features, count: int) -> Iterator[Tensor]:
        yield from states_by_level(self.run(features.taps[0], batch, self.cast()), batch, count)

    def files(self, checkpoint: Checkpoint, draft_tokens: int) -> LearnedFiles:
        """Return the files of a model of one layer, without embedding and output matrix."""
        settings = hf_settings(without_factors(self.config), checkpoint.tokenizer())
        settings |= {"exit_layer": self.taps[0], "exit_of": checkpoint.path.name}
        return LearnedFiles(settings, self.file_tensors())
