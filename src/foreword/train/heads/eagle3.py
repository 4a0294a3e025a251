"""Trains an EAGLE-3 head on unrolled chains: each draft token is computed from the head's state of the one before."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu

from foreword.backends.torch.norms import rms_norm
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.names import OUTPUT
from foreword.models.heads.writing import head_sizes, layer_config
from foreword.models.rope import rotate
from foreword.train.heads.config_files import speculators_config
from foreword.train.heads.learner import (
    HeadVocabulary,
    LearnedFiles,
    Learner,
    TapsHead,
    TapsRecipe,
    by_file_name,
    rounded_through,
    stored,
    vocabulary_tensors,
)
from foreword.train.passes.attention import chain_attention
from foreword.train.passes.layers import Sizes, compiled_for_training
from foreword.train.passes.packing import PackedBatch
from foreword.train.passes.target import Features, FrozenTarget
from foreword.train.texts.documents import Document

_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")


@dataclass(frozen=True)
class Eagle3Recipe(TapsRecipe):
    """Shape of a head; the default taps are `default_taps`."""

    own_output: bool = True  # False: the head uses rows of the target's output matrix
    drift_norms: bool = False  # EAGLE-3.1: norms of every tap, and of the state from which a chain continues

    method: ClassVar[str] = "eagle3"

    def build(self, target: FrozenTarget, vocabulary: HeadVocabulary, compiled: bool = False) -> Learner:
        return Eagle3Head(target, vocabulary, self, compiled=compiled).to(target.device)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return the taps of published EAGLE-3 heads: low, middle and high; consecutive layers in a small model.

    Engines expect ascending order, which a model of fewer than three layers cannot have.
    """
    if num_layers < 3:
        return (num_layers, num_layers // 2, 1)
    low = min(2, num_layers - 2)
    high = max(num_layers - 3, low + 2)
    return (low, min(max(num_layers // 2, low + 1), high - 1), high)


class Eagle3Head(TapsHead):
    """One decoder layer, from the concatenation of a token's embedding and a state to the next state."""

    def __init__(
        self, target: FrozenTarget, vocabulary: HeadVocabulary, recipe: Eagle3Recipe, compiled: bool = False
    ) -> None:
        taps = recipe.taps or default_taps(target.config.num_layers)
        intermediate = recipe.intermediate or head_sizes(target.config).intermediate
        hidden, (heads, kv_heads, dim) = target.config.hidden_size, target.sizes
        shapes = {
            "fc": (hidden, len(taps) * hidden),
            "q_proj": (heads * dim, 2 * hidden),
            "k_proj": (kv_heads * dim, 2 * hidden),
            "v_proj": (kv_heads * dim, 2 * hidden),
            "o_proj": (hidden, heads * dim),
            "gate_proj": (intermediate, hidden),
            "up_proj": (intermediate, hidden),
            "down_proj": (hidden, intermediate),
        }
        self._tap_norms = [f"fc_norm.{index}" for index in range(len(taps) if recipe.drift_norms else 0)]
        widths = dict.fromkeys((*_NORMS, *self._tap_norms), hidden)
        super().__init__(target, vocabulary, taps, shapes, widths, own_output=recipe.own_output)
        self.intermediate, self.window = intermediate, recipe.window
        self._functions = (
            compiled_for_training(_first_state, compiled),
            compiled_for_training(_keys_values, compiled),
            compiled_for_training(_queries, compiled),
            compiled_for_training(_next_state, compiled),
        )

    @torch.no_grad()
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        """Initialise the weights. `fc` begins as a selection of the last tap, which thereby is the first state."""
        super().begin(documents, seed)
        if self._tap_norms:  # norms of the taps give them a similar size, so that no scales are needed
            self.tap_scales.fill_(1)
        fc, hidden = self.matrices["fc"], self.target.config.hidden_size
        fc.zero_()
        fc[:, -hidden:] = torch.eye(hidden)

    def weights(self) -> dict[str, nn.Parameter]:
        named = {OUTPUT: self.lm_head} if self.lm_head.requires_grad else {}
        for name, tensor in by_file_name(self.matrices, self.norms).items():
            module = "self_attn." if name in _ATTENTION else "mlp." if name in _MLP else ""
            prefix = "" if name in ("fc", "norm", *self._tap_norms) else f"layers.0.{module}"
            named[f"{prefix}{name}.weight"] = tensor
        return named

    def steps(self, batch: PackedBatch, features: Features, count: int) -> Iterator[Tensor]:
        first_state, keys_values, queries, next_state = self._functions
        target, eps, sizes = self.target, self.target.config.norm.eps, self.target.sizes
        weights, rows = self._cast(target.dtype), batch.tail_rows
        projections = weights["k_proj"], weights["v_proj"]

        def token_states(token_ids: Tensor) -> Tensor:
            return rms_norm(embedding(token_ids, target.weights.embedding), weights["input_layernorm"], eps)

        taps = self._normed_taps(features, weights) if self._tap_norms else self.scaled_taps(features)
        state = first_state(taps, weights["fc"], weights["hidden_norm"], eps)
        token = token_states(batch.token_ids.roll(-1))
        text_kv = keys_values(token, state, *projections, *target.head_rotation(batch.positions), sizes)
        state, token = state[rows], token[rows]
        chain: list[tuple[Tensor, Tensor]] = []  # (keys, values) of the earlier draft tokens
        for step in range(count):
            rotation = target.head_rotation(batch.positions[rows] + step)
            if step:
                token = token_states(batch.input_tokens(step))
                chain.append(keys_values(token, state, *projections, *rotation, sizes))
            q = queries(token, state, weights["q_proj"], *rotation, sizes)
            attended = chain_attention(q, *text_kv, chain, batch.tails, batch.texts, self.window)
            state, output = next_state(state, attended, weights, eps, bool(self._tap_norms))
            yield output

    def _normed_taps(self, features: Features, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the taps [rows, taps * hidden], each after its own norm."""
        eps, taps = self.target.config.norm.eps, zip(features.taps, self._tap_norms, strict=True)
        return torch.cat([rms_norm(tap, weights[name], eps) for tap, name in taps], dim=-1)

    def _cast(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all weights except the output matrix in `dtype`; gradients flow through."""
        matrices: dict[str, Tensor] = {**self.matrices}
        if self.round_bits is not None:
            matrices = {name: rounded_through(matrix, self.round_bits) for name, matrix in matrices.items()}
        return {name: tensor.to(dtype) for name, tensor in (matrices | by_file_name(self.norms)).items()}

    def files(self, checkpoint: Checkpoint, draft_tokens: int) -> LearnedFiles:
        tensors = self.file_tensors() | vocabulary_tensors(self.vocabulary)
        borrowed = frozenset({OUTPUT} - tensors.keys())
        tensors[OUTPUT] = stored(self.lm_head)
        config = speculators_config("eagle3", checkpoint, draft_tokens) | {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": len(self.vocabulary.token_ids),
            "target_hidden_size": None,
            "norm_before_residual": True,
            "norm_before_fc": False,
            "fc_norm": bool(self._tap_norms),
            "norm_output": bool(self._tap_norms),
            "embed_requires_grad": False,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "tie_word_embeddings": False,
            "transformer_layer_config": layer_config(
                checkpoint.config, self.intermediate, window=self.window
            ),
        }
        return LearnedFiles(config, tensors, borrowed=borrowed)


def _first_state(taps: Tensor, fc: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Return the state of every row before the first step, normalised (`norm_before_residual`)."""
    return rms_norm(linear(taps, fc), norm, eps)


def _keys_values(
    token: Tensor,
    state: Tensor,
    key_matrix: Tensor,
    value_matrix: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: Sizes,
) -> tuple[Tensor, Tensor]:
    """Return rotated keys and values [rows, kv heads, dim] of tokens (embedded) and states, both [rows, hidden]."""
    _, kv_heads, dim = sizes
    joined = torch.cat((token, state), dim=-1)
    keys = linear(joined, key_matrix).view(-1, kv_heads, dim)
    return rotate(keys, cos, sin), linear(joined, value_matrix).view(-1, kv_heads, dim)


def _queries(token: Tensor, state: Tensor, matrix: Tensor, cos: Tensor, sin: Tensor, sizes: Sizes) -> Tensor:
    heads, _, dim = sizes
    return rotate(linear(torch.cat((token, state), dim=-1), matrix).view(-1, heads, dim), cos, sin)


def _next_state(
    state: Tensor, attended: Tensor, weights: Mapping[str, Tensor], eps: float, continues_normed: bool
) -> tuple[Tensor, Tensor]:
    """Run the rest of the layer after attention; return the next step's state, and the state for the output matrix.

    `continues_normed`: the next step's state is computed from the state for the output matrix.
    """
    stream = state + linear(attended.flatten(1), weights["o_proj"])
    normed = rms_norm(stream, weights["post_attention_layernorm"], eps)
    gated = silu(linear(normed, weights["gate_proj"])) * linear(normed, weights["up_proj"])
    stream = stream + linear(gated, weights["down_proj"])
    output = rms_norm(stream, weights["norm"], eps)
    return rms_norm(output if continues_normed else stream, weights["hidden_norm"], eps), output
