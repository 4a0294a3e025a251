"""Trains an EAGLE-3 head by unrolling its chain on its own states."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu

from foreword.backends.torch.norms import rms_norm
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.layouts.common import OUTPUT
from foreword.models.heads.writing import layer_config
from foreword.models.rope import rotate
from foreword.train.heads.config_files import speculators_section
from foreword.train.heads.learner import LearnedFiles, TapsHead, check_taps, rounded_through, stored
from foreword.train.passes.attention import chain_attention
from foreword.train.passes.layers import Sizes
from foreword.train.passes.packing import PackedBatch
from foreword.train.passes.target import Features, FrozenTarget
from foreword.train.passes.vocabulary import HeadVocabulary, vocabulary_tensors
from foreword.train.texts.documents import Document

_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")


@dataclass(frozen=True)
class Eagle3Recipe:
    """Sizes of a head; defaults are those of a target's layer."""

    draft_vocab: int = 16384
    taps: tuple[int, ...] | None = None
    intermediate: int | None = None
    own_output: bool = True  # False: the rows of the target's output matrix

    method: ClassVar[str] = "eagle3"

    def check(self, target: ModelConfig) -> None:
        check_taps(self.taps, target)

    def build(
        self, target: FrozenTarget, vocabulary: HeadVocabulary, *, compiled: bool = False
    ) -> "Eagle3Head":
        taps = self.taps or default_taps(target.config.num_layers)
        intermediate = self.intermediate or target.config.layer.mlp.intermediate_size
        head = Eagle3Head(
            target, vocabulary, taps, intermediate, own_output=self.own_output, compiled=compiled
        )
        return head.to(target.device)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return the default taps of EAGLE-3 heads; for small models, three consecutive ones.

    Engines expect ascending order; fewer than three layers are not enough.
    """
    if num_layers < 3:
        return (num_layers, num_layers // 2, 1)
    low = min(2, num_layers - 2)
    high = max(num_layers - 3, low + 2)
    return (low, min(max(num_layers // 2, low + 1), high - 1), high)


class Eagle3Head(TapsHead):
    """One layer that reads token and state side by side; its output state is the next step's input."""

    def __init__(
        self,
        target: FrozenTarget,
        vocabulary: HeadVocabulary,
        taps: Sequence[int],
        intermediate: int,
        *,
        own_output: bool = True,
        compiled: bool = False,
    ) -> None:
        heads, kv_heads, dim = target.sizes
        hidden = target.config.hidden_size
        wide, queries, keys = 2 * hidden, heads * dim, kv_heads * dim
        sizes = {
            "fc": (hidden, len(taps) * hidden),
            "q_proj": (queries, wide),
            "k_proj": (keys, wide),
            "v_proj": (keys, wide),
            "o_proj": (hidden, queries),
            "gate_proj": (intermediate, hidden),
            "up_proj": (intermediate, hidden),
            "down_proj": (hidden, intermediate),
        }
        widths = dict.fromkeys(_NORMS, hidden)
        super().__init__(target, vocabulary, taps, sizes, widths, own_output=own_output)
        self.intermediate = intermediate
        self._plain = _Parts(compiled=False)
        self._parts = _Parts(compiled=compiled)

    @torch.no_grad()
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        """Initialise the weights; the state starts as the last tap."""
        super().begin(documents, seed)
        fc, hidden = self.matrices["fc"], self.target.config.hidden_size
        fc.zero_()
        fc[:, -hidden:] = torch.eye(hidden)

    def files(self, checkpoint: Checkpoint, draft_tokens: int) -> LearnedFiles:
        tensors = self.file_tensors() | vocabulary_tensors(self.vocabulary)
        borrowed = frozenset({OUTPUT} - tensors.keys())
        tensors[OUTPUT] = stored(self.lm_head)
        return LearnedFiles(eagle3_config(self, checkpoint, draft_tokens), tensors, borrowed=borrowed)

    def weights(self) -> dict[str, nn.Parameter]:
        found = {OUTPUT: self.lm_head} if self.lm_head.requires_grad else {}
        for name, tensor in (*self.matrices.items(), *self.norms.items()):
            part = "self_attn." if name in _ATTENTION else "mlp." if name in _MLP else ""
            prefix = "" if name in ("fc", "norm") else f"layers.0.{part}"
            found[f"{prefix}{name}.weight"] = tensor
        return found

    def steps(self, batch: PackedBatch, features: Features, count: int) -> Iterator[Tensor]:
        target, eps, sizes = self.target, self.target.config.norm.eps, self.target.sizes
        # Compiling again without gradients, for evaluation, would not pay off.
        parts = self._parts if torch.is_grad_enabled() else self._plain
        weights = self._cast(target.dtype)
        rows = batch.tail_rows

        def token_states(token_ids: Tensor) -> Tensor:
            return rms_norm(embedding(token_ids, target.weights.embedding), weights["input_layernorm"], eps)

        state = parts.state(self.scaled_taps(features), weights["fc"], weights["hidden_norm"], eps)
        token = token_states(batch.token_ids.roll(-1))
        keys, values = parts.keys_values(
            token, state, weights["k_proj"], weights["v_proj"], *target.head_rotation(batch.positions), sizes
        )
        state, token = state[rows], token[rows]
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(count):
            rotation = target.head_rotation(batch.positions[rows] + step)
            if step:
                token = token_states(batch.held(step))
                own.append(
                    parts.keys_values(token, state, weights["k_proj"], weights["v_proj"], *rotation, sizes)
                )
            queries = parts.queries(token, state, weights["q_proj"], *rotation, sizes)
            attended = chain_attention(queries, keys, values, own, batch.tails, batch.texts)
            state, output = parts.after(state, attended, weights, eps)
            yield output

    def _cast(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all weights except the output matrix in `dtype`; gradients flow through."""
        matrices: dict[str, Tensor] = {**self.matrices}
        if self.round_bits is not None:
            matrices = {name: rounded_through(matrix, self.round_bits) for name, matrix in matrices.items()}
        return {name: tensor.to(dtype) for name, tensor in {**matrices, **self.norms}.items()}


class _Parts:
    """Compiled parts of a step between two attentions."""

    def __init__(self, *, compiled: bool) -> None:
        self.state = torch.compile(_state, dynamic=False) if compiled else _state
        self.keys_values = torch.compile(_keys_values, dynamic=False) if compiled else _keys_values
        self.queries = torch.compile(_queries, dynamic=False) if compiled else _queries
        self.after = torch.compile(_after, dynamic=False) if compiled else _after


def _state(taps: Tensor, fc: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Return the initial state of every slot, normalised (`norm_before_residual`)."""
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
    _, kv_heads, dim = sizes
    joined = torch.cat((token, state), dim=-1)
    keys = linear(joined, key_matrix).view(-1, kv_heads, dim)
    return rotate(keys, cos, sin), linear(joined, value_matrix).view(-1, kv_heads, dim)


def _queries(token: Tensor, state: Tensor, matrix: Tensor, cos: Tensor, sin: Tensor, sizes: Sizes) -> Tensor:
    heads, _, dim = sizes
    return rotate(linear(torch.cat((token, state), dim=-1), matrix).view(-1, heads, dim), cos, sin)


def _after(
    state: Tensor, attended: Tensor, weights: Mapping[str, Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    """Return the next step's state (normalised), and the state for the output matrix."""
    stream = state + linear(attended.flatten(1), weights["o_proj"])
    normed = rms_norm(stream, weights["post_attention_layernorm"], eps)
    gated = silu(linear(normed, weights["gate_proj"])) * linear(normed, weights["up_proj"])
    stream = stream + linear(gated, weights["down_proj"])
    return rms_norm(stream, weights["hidden_norm"], eps), rms_norm(stream, weights["norm"], eps)


def eagle3_config(head: "Eagle3Head", checkpoint: Checkpoint, draft_tokens: int) -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(head.vocabulary.token_ids),
        "target_hidden_size": None,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": layer_config(checkpoint.config, head.intermediate),
        "speculators_config": speculators_section("eagle3", checkpoint, draft_tokens),
    }
