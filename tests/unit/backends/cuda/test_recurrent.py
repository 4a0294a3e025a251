"""Recurrent layers on kernels: rows, states and rings as torch's, over chunks, trees and several requests."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foreword.backends.batch import ForwardBatch
from foreword.backends.memory import spec_of_states
from foreword.backends.torch.recurrent import LayerStates, recurrent_mixing
from foreword.backends.torch.recurrent_rows import RecurrentStore, request_passes
from foreword.backends.torch.weights import RecurrentWeights
from foreword.kv.chunks import CHUNK, StateSizes
from foreword.kv.paged_cache import PagedCache
from foreword.models.config import Recurrence, RecurrentSpec
from foreword.models.layer_shapes import recurrent_inputs
from foreword.speculation.draft import Draft
from foreword.speculation.requests import NOTHING_DRAWN, PassEntry, Verdict
from foreword.speculation.transaction import Transaction
from helpers.cuda import KERNEL_DEVICE, needs_triton
from helpers.passes import make_request
from helpers.trees import random_tokens

pytestmark = needs_triton

EPS = 1e-3
SPECS = {
    "delta": RecurrentSpec(Recurrence.DELTA, kernel=4, heads=2, value_dim=40, key_heads=1, key_dim=12),
    "mamba": RecurrentSpec(
        Recurrence.SSM,
        kernel=4,
        heads=4,
        value_dim=12,
        key_heads=2,
        key_dim=10,
        conv_bias=True,
        norm_groups=2,
        time_limits=(0.3, 1.1),
    ),
    "convolution": RecurrentSpec(Recurrence.NONE, kernel=3, heads=1, value_dim=20, conv_bias=True),
}


def random_weights(spec: RecurrentSpec) -> RecurrentWeights:
    def some(*shape: int) -> Tensor:
        return torch.randn(shape) * 0.5

    bias = some(spec.channels) if spec.conv_bias else None
    if spec.kind is Recurrence.NONE:
        return RecurrentWeights(some(spec.channels, spec.kernel), bias)
    width = spec.value_dim if spec.kind is Recurrence.DELTA else spec.value_width
    skip = some(spec.heads) if spec.kind is Recurrence.SSM else None
    small = -2 + some(spec.heads)
    return RecurrentWeights(
        some(spec.channels, spec.kernel), bias, 1 + some(width), small, some(spec.heads), skip
    )


class Both:
    """One layer in torch and on kernels, with memory of their own."""

    def __init__(self, spec: RecurrentSpec, sizes: StateSizes, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self._spec, self._weights = spec, random_weights(spec)
        self._on_device = RecurrentWeights(
            *(
                part if part is None else part.to(KERNEL_DEVICE, dtype if part.ndim > 1 else part.dtype)
                for part in vars(self._weights).values()
            )
        )
        memory = spec_of_states(spec, 1, 4)
        self.torch = RecurrentStore(memory, sizes, torch.float32, torch.device("cpu"))
        self.kernels = RecurrentStore(memory, sizes, torch.float32, KERNEL_DEVICE, row_dtype=dtype)
        for mine, theirs in zip(self.kernels.states, self.torch.states, strict=True):
            theirs[:, 0] = torch.randn(theirs[:, 0].shape)  # texts begin with a state that is not zero
            mine[:, 0] = theirs[:, 0].to(KERNEL_DEVICE)

    def check(self, batch: ForwardBatch, page_size: int) -> None:
        projected = torch.randn(len(batch.token_ids), sum(recurrent_inputs(self._spec).values()))
        self.torch.move(batch.ring_copies)
        states = LayerStates(self.torch, 0, request_passes(batch, self._spec.kernel, torch.device("cpu")))
        expected = recurrent_mixing(self._spec, self._weights, projected, EPS, states)
        torch.testing.assert_close(
            self.found(batch, projected, page_size).cpu(), expected, atol=1e-4, rtol=1e-4
        )

    def found(self, batch: ForwardBatch, projected: Tensor, page_size: int) -> Tensor:
        from foreword.backends.cuda.kernels.ancestors import ancestor_nodes
        from foreword.backends.cuda.layout import Layout
        from foreword.backends.cuda.recurrent import RecurrentPass, by_tap, mix_positions, move_ring
        from foreword.backends.cuda.state_plan import plan_pieces
        from foreword.backends.cuda.upload import PassUpload

        layout, ring_rows = Layout.of(batch, page_size, 1, 1), self.kernels.ring.inputs.shape[1]
        pieces = plan_pieces(batch, layout, self._spec.kernel, ring_rows)
        uploaded = PassUpload(KERNEL_DEVICE).send(batch, layout, 0, pieces)
        assert uploaded.states is not None
        move_ring(self.kernels, uploaded.states)
        ancestors = ancestor_nodes(uploaded.batch.ancestor_masks) if layout.shape.has_trees else None
        given = RecurrentPass(self.kernels, uploaded.states, uploaded.batch.positions, ancestors)
        padded = torch.zeros((layout.shape.rows, projected.shape[1]), dtype=projected.dtype)
        padded[: len(projected)] = projected
        return mix_positions(self._spec, by_tap(self._on_device), padded.to(KERNEL_DEVICE), EPS, given, 0)[
            : len(projected)
        ]


def compute_chunks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute passes without branches as long prompts are computed, however few rows they have."""
    from foreword.backends.cuda import recurrent

    monkeypatch.setattr(recurrent, "DECODE_ROWS", (0,))
    monkeypatch.setattr(recurrent, "MOST_EMPTY", 1000)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("kind", SPECS)
def test_rows_in_chunks_and_trees_equal_torch(kind: str, at_once: bool, monkeypatch: pytest.MonkeyPatch):
    if at_once:
        compute_chunks_at_once(monkeypatch)
    rng, sizes = random.Random(1), StateSizes(2)
    cache, both = PagedCache(40, states=sizes), Both(SPECS[kind], sizes)
    request = make_request(cache, random_tokens(rng, CHUNK + 14))
    other = make_request(cache, random_tokens(rng, CHUNK + 3))
    # A chain of two, a second branch, and a path through both that needs moves.
    tree = Draft(tuple(random_tokens(rng, 5)), (-1, 0, -1, 2, 3), len(request.tokens))
    steps = [
        ([(request, CHUNK - 6)], [Draft()], [NOTHING_DRAWN]),
        ([(request, 19), (other, CHUNK)], [Draft(), Draft()], [NOTHING_DRAWN] * 2),
        (
            [(request, 1), (other, 1)],
            [tree, Draft.chain([5, 6], CHUNK + 1)],
            [Verdict((2, 3, 4), (*tree.tokens[2:], 9)), Verdict((0,), (5, 8))],
        ),
        ([(request, 1)], [Draft()], [NOTHING_DRAWN]),
    ]
    for scheduled, drafts, verdicts in steps:
        entries = [PassEntry.of(one, rows) for one, rows in scheduled]
        with Transaction(cache, entries) as transaction:
            both.check(transaction.batch(drafts), cache.page_size)
            transaction.commit(verdicts)
    for mine, theirs in zip(both.kernels.states, both.torch.states, strict=True):
        used = [request.kv.chunks[0].state, other.kv.chunks[0].state]
        torch.testing.assert_close(mine[:, used].cpu(), theirs[:, used], atol=1e-4, rtol=1e-4)


# Triton's interpreter is slow, and does not compute in bf16.
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16] if KERNEL_DEVICE.type == "cuda" else [torch.float16]
)
@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_chunks_at_once_have_the_bits_of_rows_in_order(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    spec = replace(SPECS[kind], heads=2, key_heads=1, value_dim=12)  # heads and values are independent here

    def outputs() -> list[Tensor]:
        rng, sizes = random.Random(1), StateSizes(2)
        cache, both = PagedCache(40, states=sizes), Both(spec, sizes, dtype)
        request = make_request(cache, random_tokens(rng, 2 * CHUNK))
        other = make_request(cache, random_tokens(rng, CHUNK))
        found = []
        for scheduled in [(request, 19)], [(request, 60), (other, 30)], [(other, 7), (request, 12)]:
            with Transaction(cache, [PassEntry.of(one, rows) for one, rows in scheduled]) as transaction:
                batch = transaction.batch([Draft()] * len(scheduled))
                projected = torch.randn(len(batch.token_ids), sum(recurrent_inputs(spec).values()))
                found.append(both.found(batch, projected.to(dtype), cache.page_size))
                transaction.commit([NOTHING_DRAWN] * len(scheduled))
        used = [request.kv.chunks[0].state, other.kv.chunks[0].state]
        return [*found, *(states[:, used] for states in both.kernels.states)]

    in_order = outputs()
    compute_chunks_at_once(monkeypatch)
    at_once = outputs()
    for mine, theirs in zip(at_once, in_order, strict=True):
        assert torch.equal(mine, theirs)
