"""An EAGLE-3 head as it is trained: its chain unrolled with its own states."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu

from foreword.backends.torch.norms import rms_norm
from foreword.models.rope import rotate
from foreword.train.attention import chain_attention
from foreword.train.packing import PackedBatch
from foreword.train.target import Features, Target


@dataclass(frozen=True)
class Eagle3Shape:
    """Everything that a head's size follows from."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int  # tokens that it can guess
    taps: tuple[int, ...]  # boundaries b: the target's stream after b layers
    eps: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """What EAGLE-3 heads read where their config does not say."""
    return (min(2, num_layers), num_layers // 2, max(num_layers - 3, 1))


def shape_for(
    target: Target, vocabulary: int, taps: Sequence[int] | None = None, intermediate: int | None = None
) -> Eagle3Shape:
    """A head with the sizes of one of the target's layers."""
    config, spec = target.config, target.attention
    return Eagle3Shape(
        hidden=config.hidden_size,
        intermediate=intermediate or config.layer.mlp.intermediate_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocabulary=min(vocabulary, config.vocab_size),
        taps=tuple(taps or default_taps(config.num_layers)),
        eps=config.norm.eps,
    )


class Eagle3Head(nn.Module):
    """The weights, in float32; a pass casts them to the target's numbers once."""

    tap_scales: Tensor

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, queries, keys = 2 * shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {
            "fc": (shape.hidden, len(shape.taps) * shape.hidden),
            "q_proj": (queries, wide),
            "k_proj": (keys, wide),
            "v_proj": (keys, wide),
            "o_proj": (shape.hidden, queries),
            "gate_proj": (shape.intermediate, shape.hidden),
            "up_proj": (shape.intermediate, shape.hidden),
            "down_proj": (shape.hidden, shape.intermediate),
        }
        self.matrices = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(size)) for name, size in sizes.items()}
        )
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self.norms = nn.ParameterDict({name: nn.Parameter(torch.ones(shape.hidden)) for name in names})
        self.lm_head = nn.Parameter(torch.empty(shape.vocabulary, shape.hidden))
        self.register_buffer("tap_scales", torch.ones(len(shape.taps)))

    @torch.no_grad()
    def begin_from(self, target: Target, kept: Tensor, seed: int) -> None:
        """Small random matrices; the state begins as the last tap, the output as the target's own."""
        generator = torch.Generator().manual_seed(seed)
        for name, matrix in self.matrices.items():
            width = matrix.shape[1]
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * (0.5 / width**0.5))
            if name in ("o_proj", "down_proj"):
                matrix.mul_(0.1)
        fc = self.matrices["fc"]
        fc.zero_()
        fc[:, -self.shape.hidden :] = torch.eye(self.shape.hidden)
        self.norms["norm"].copy_(target.weights.final_norm)
        self.lm_head.copy_(target.weights.head[kept.to(target.device)])

    @torch.no_grad()
    def scale_taps(self, features: Features) -> None:
        """Make all taps about equally large, so that the optimiser treats them alike."""
        for number, tap in enumerate(features.taps):
            # A few tokens (a text's first, above all) have states a hundred times larger.
            size = tap.float().pow(2).mean(-1).sqrt().median()
            self.tap_scales[number] = 1 / size.clamp(min=1e-6)

    def cast(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All weights in `dtype` but the output matrix; gradients flow through."""
        groups: Mapping[str, Tensor] = {**self.matrices, **self.norms}
        return {name: tensor.to(dtype) for name, tensor in groups.items()}


class ChainPass:
    """One unrolled pass over a batch: `steps` gives the state after each guess, for every tail row."""

    def __init__(self, target: Target, head: Eagle3Head, *, compiled: bool = False) -> None:
        self._target = target
        self._head = head
        self._state = torch.compile(_state, dynamic=False) if compiled else _state
        self._keys_values = torch.compile(_keys_values, dynamic=False) if compiled else _keys_values
        self._queries = torch.compile(_queries, dynamic=False) if compiled else _queries
        self._after = torch.compile(_after, dynamic=False) if compiled else _after

    def steps(self, batch: PackedBatch, features: Features, count: int) -> Iterator[Tensor]:
        """States [tails, hidden], already normed for the output matrix."""
        shape, target = self._head.shape, self._target
        weights = self._head.cast(target.dtype)
        sizes = (shape.heads, shape.kv_heads, shape.head_dim)
        rows = batch.tail_rows

        def embed(token_ids: Tensor) -> Tensor:
            return embedding(token_ids, target.weights.embedding)

        taps = torch.cat(features.taps, dim=-1)
        state = self._state(taps, self._head.tap_scales, weights["fc"], weights["hidden_norm"], shape.eps)
        token = self._norm_token(embed(batch.token_ids.roll(-1)), weights)
        keys, values = self._keys_values(
            token, state, weights["k_proj"], weights["v_proj"], *target.rotation(batch.positions), sizes
        )
        state, token = state[rows], token[rows]
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(count):
            rotation = target.rotation(batch.positions[rows] + step)
            if step:
                token = self._norm_token(embed(batch.held(step)), weights)
                own.append(
                    self._keys_values(token, state, weights["k_proj"], weights["v_proj"], *rotation, sizes)
                )
            queries = self._queries(token, state, weights["q_proj"], *rotation, sizes)
            attended = chain_attention(queries, keys, values, own, batch.tails, batch.texts)
            state, output = self._after(state, attended, weights, shape.eps)
            yield output

    def _norm_token(self, token: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return rms_norm(token, weights["input_layernorm"], self._head.shape.eps)


def _state(taps: Tensor, scales: Tensor, fc: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The head's first state for every slot, normed (`norm_before_residual`)."""
    width = taps.shape[1] // len(scales)
    scaled = taps * scales.repeat_interleave(width).to(taps.dtype)
    return rms_norm(linear(scaled, fc), norm, eps)


def _keys_values(
    token: Tensor,
    state: Tensor,
    key_matrix: Tensor,
    value_matrix: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    _, kv_heads, dim = sizes
    joined = torch.cat((token, state), dim=-1)
    keys = linear(joined, key_matrix).view(-1, kv_heads, dim)
    return rotate(keys, cos, sin), linear(joined, value_matrix).view(-1, kv_heads, dim)


def _queries(
    token: Tensor, state: Tensor, matrix: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int, int]
) -> Tensor:
    heads, _, dim = sizes
    return rotate(linear(torch.cat((token, state), dim=-1), matrix).view(-1, heads, dim), cos, sin)


def _after(
    state: Tensor, attended: Tensor, weights: Mapping[str, Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    """The next step's state (normed, as the next step will read it), and the state for the output matrix."""
    stream = state + linear(attended.flatten(1), weights["o_proj"])
    normed = rms_norm(stream, weights["post_attention_layernorm"], eps)
    gated = silu(linear(normed, weights["gate_proj"])) * linear(normed, weights["up_proj"])
    stream = stream + linear(gated, weights["down_proj"])
    return rms_norm(stream, weights["hidden_norm"], eps), rms_norm(stream, weights["norm"], eps)
