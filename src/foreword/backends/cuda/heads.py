"""Draft heads on a GPU: a chain of draft tokens is one captured graph, without a round trip to the host in between."""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear as library_linear
from torch.nn.functional import pad

from foreword.acceptance.transfer import started
from foreword.backends.batch import ForwardBatch
from foreword.backends.cuda.draws import DraftIds, as_chains, drawn_ids, draws_of, words
from foreword.backends.cuda.graphs import GraphsByMemory
from foreword.backends.cuda.kernels.attention import PART, RowTiles, Sight
from foreword.backends.cuda.kernels.chains import ChainEnds, chain_places, run_lengths
from foreword.backends.cuda.kernels.rows import (
    add_norm,
    fill_in,
    rotate_and_keep,
    silu_times_up,
    take_rows,
)
from foreword.backends.cuda.layout import DECODE_ROWS, Layout, PassShape, power_of_two
from foreword.backends.cuda.products import Products
from foreword.backends.cuda.upload import PassUpload, TiledRows, UploadedPass, attended
from foreword.backends.interface import (
    ChainPlan,
    Chains,
    HeadCall,
    HeadInput,
    HeadOutput,
    KnownChains,
    KvStore,
    PendingChains,
)
from foreword.backends.torch.heads import HeadOps, HeadTensors, LentEnds, TorchHead
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.norms import rms_norm
from foreword.backends.torch.upload import Piece, Upload
from foreword.kv.states import as_tensor
from foreword.models.heads.opening import Head
from foreword.models.heads.spec import Join

LIBRARY_FROM = 65
"""Rows from which on the vendor's products are used: those of a prompt. Nothing here has to keep its bits."""

_MOST_CHAINS = 1 << 12
"""Requests of one call."""

_MORE_ENTRIES = 1 << 17
"""32-bit numbers that a chain needs beside its first pass."""


def _kernel_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.ndim != 2:
        return rms_norm(x, weight, eps)
    contiguous = x.contiguous()
    return add_norm(contiguous, None, weight, eps, torch.empty_like(contiguous))


def kernel_ops() -> HeadOps:
    """Return norms and products on Triton kernels; large products are the vendor's."""
    products = Products()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) >= LIBRARY_FROM:
            return library_linear(x, weight, bias)
        return products(x.contiguous(), weight, bias)

    return HeadOps(_kernel_norm, linear)


class KernelHead:
    """What heads on Triton kernels share. Trees, prompts, and what kernels cannot run are left to the reference."""

    stops = False

    def __init__(self, head: Head, rows: str, ends: LentEnds, *, captures: bool, captured_rows: int) -> None:
        """`captured_rows` is the size of the largest pass that is captured."""
        self.spec = head.spec
        self._tensors = HeadTensors(head, ends, kernel_ops())
        self._reference = TorchHead(self._tensors, rows, bucketed=True)
        self.markov_before, self.markov_after = self._tensors.markov_before, self._tensors.markov_after
        attention = head.spec.layers[0].attention
        self._group, self._kv_heads = attention.num_heads // attention.num_kv_heads, attention.num_kv_heads
        self._rows, self._captures, self._captured_rows = rows, captures, captured_rows
        self._upload = PassUpload(ends.device)
        self._more = Upload(ends.device, _MORE_ENTRIES)
        width = head.spec.feature_width
        self._features = torch.zeros((captured_rows, width), dtype=ends.dtype, device=ends.device)
        self._ids = DraftIds(head.spec.draft_vocab_size, ends.device)
        self._in_kernels = (
            head.spec.join is not Join.NONE and 2 * len(self._tensors.frequencies) == attention.head_dim
        )
        if self._in_kernels:
            for index in range(len(head.spec.layers)):
                self._join(index, "self_attn.", ("q_proj", "k_proj", "v_proj"))
                self._join(index, "mlp.", ("gate_proj", "up_proj"))

    def _join(self, index: int, place: str, names: tuple[str, ...]) -> None:
        """One matrix for all; those that the reference uses become parts of it."""
        whole, tensors = f"layers.{index}.{place}", self._tensors.by_name
        for kind in ("weight", "bias"):
            parts = [tensors.get(f"{whole}{name}.{kind}") for name in names]
            present = [part for part in parts if part is not None]
            if len(present) < len(parts):
                self._in_kernels &= not present
                continue
            joined = tensors[f"{whole}joined.{kind}"] = torch.cat(present)
            sizes = [len(part) for part in present]
            for name, part in zip(names, joined.split_with_sizes(sizes), strict=True):
                tensors[f"{whole}{name}.{kind}"] = part

    @property
    def weight_bytes(self) -> int:
        return self._reference.weight_bytes

    @torch.inference_mode()
    def draft(self, call: HeadCall) -> HeadOutput | Chains:
        chains: Chains | None = None if call.plan is None else self._chains(call, call.plan)
        if chains is not None:
            return chains
        if call.plan is not None and call.plan.unsettled is not None:
            return KnownChains(
                [[]] * len(call.plan.steps)
            )  # the reference cannot read tokens that are not known
        if call.context is not None:
            self._reference.forward(call.context, call.store)
        return self._output(call.rows, call.store)

    def _chains(self, call: HeadCall, plan: ChainPlan) -> PendingChains | None:
        """Return planned chains; None: the reference's logits are used."""
        raise NotImplementedError

    def _output(self, wanted: HeadInput, store: KvStore) -> HeadOutput:
        """Return logits and states of the wanted rows."""
        raise NotImplementedError

    def _placed(self, features: Tensor, rows: int) -> Tensor:
        """The features where a captured pass finds them."""
        if rows > len(self._features):
            return pad(features.to(self._features.dtype), (0, 0, 0, rows - len(features)))
        self._features[: len(features)] = features
        return self._features[:rows]

    def _layers(
        self,
        stream: Tensor,
        read: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        sight: Sight,
        slots: Tensor,
        tiles: TiledRows,
        store: TorchKvStore,
    ) -> Tensor:
        """The stream after all layers."""
        keys, values = store.arrays(self._rows)
        eps, stream = self.spec.norm.eps, stream.clone()
        for index, layer in enumerate(self.spec.layers):
            prefix, attention = f"layers.{index}.", layer.attention
            if index:
                read = self._tensors.norm(stream, prefix + "input_layernorm.weight")
            qkv = self._tensors.linear(read, prefix + "self_attn.joined")
            queries = qkv.new_empty((len(qkv), attention.num_heads, attention.head_dim))
            norms = self._pair_of_norms(index)
            rotate_and_keep(qkv, cos_sin, slots, norms, eps, keys[index], values[index], queries)
            seen = attended(queries, keys[index], values[index], sight, tiles)
            delta = self._tensors.linear(seen.view(len(seen), -1), prefix + "self_attn.o_proj")
            normed = self._added(stream, delta, prefix + "post_attention_layernorm.weight")
            gate_up = self._tensors.linear(normed, prefix + "mlp.joined")
            active = silu_times_up(gate_up, gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2)))
            stream += self._tensors.linear(active, prefix + "mlp.down_proj")
        return stream

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position, float32."""
        angles = positions.unsqueeze(-1).float() * self._tensors.frequencies
        return angles.cos(), angles.sin()

    def _pair_of_norms(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Of queries and keys, if a layer has them."""
        query, key = (
            self._tensors.by_name.get(f"layers.{index}.self_attn.{name}_norm.weight") for name in ("q", "k")
        )
        return None if query is None or key is None else (query, key)

    def _added(self, stream: Tensor, delta: Tensor, name: str) -> Tensor:
        """Adds to the stream, and returns it normed if the head has such a norm."""
        if not self.spec.has(name):
            return stream.add_(delta)
        return add_norm(
            stream, delta, self._tensors.by_name[name], self.spec.norm.eps, torch.empty_like(stream)
        )


@dataclass(frozen=True)
class ChainShape:
    """Everything that a captured chain has built in."""

    first: PassShape  # of the pass over committed tokens
    levels: int  # draft tokens
    parts: int  # of the longest text with its draft
    samples: bool
    names: Hashable  # of the tokens that it can draft


@dataclass(frozen=True)
class _ChainInputs:
    """What a chain reads beside its first pass, on the device; requests are padded."""

    ends: ChainEnds
    temperature: Tensor  # float64 [requests]
    starts: Tensor  # int32 [requests], KV rows before these are not there
    tiles: RowTiles  # one row each


class CudaHead(KernelHead):
    """A head that drafts token by token: its chains run on Triton kernels."""

    def __init__(self, head: Head, rows: str, ends: LentEnds, *, captures: bool) -> None:
        super().__init__(head, rows, ends, captures=captures, captured_rows=DECODE_ROWS[-1])
        self._gained = torch.zeros(_MOST_CHAINS, dtype=torch.int32, device=ends.device)
        self._graphs: GraphsByMemory[ChainShape, Tensor] = GraphsByMemory()
        self.drafts_early = self._in_kernels

    def _output(self, wanted: HeadInput, store: KvStore) -> HeadOutput:
        return self._reference.forward(wanted, store)

    def _chains(self, call: HeadCall, plan: ChainPlan) -> PendingChains | None:
        """Return planned chains; None: the reference's logits are used.

        Filters of the distribution are left out: they would cut tokens that the target seldom draws.
        """
        names, wanted, store = self._ids.of(plan), call.rows, call.store
        if not self._in_kernels or names is None or not isinstance(store, TorchKvStore):
            return None
        if len(plan.steps) > _MOST_CHAINS:
            return None
        batch = ForwardBatch.of(wanted.arrays)
        layout = Layout.of(batch, store.page_size, self._group, self._kv_heads)
        levels, unsettled = int(plan.steps.max()), plan.unsettled
        longest = int(plan.lengths.max()) + levels + (0 if unsettled is None else unsettled.places.shape[1])
        shape = ChainShape(layout.shape, levels, power_of_two(-(-longest // PART)), *draws_of(plan))
        began = started(self._features.device)
        uploaded = self._upload.send(batch, layout, store.spare_slot)
        given = self._inputs(wanted, plan, shape, uploaded)
        if unsettled is not None:
            fill_in(uploaded.batch.token_ids, unsettled.drawn)
        features = self._placed(as_tensor(wanted.features), layout.shape.rows)

        def body() -> Tensor:
            return self._run_chain(shape, uploaded, given, features, names, store)

        captured = self._captures and layout.shape.is_decode and uploaded.stays
        drawn, is_cold = self._graphs.of(store).run(shape, body) if captured else (body(), False)
        # Other chains may run before these tokens are verified, and a captured one has its result in one place.
        return as_chains(drawn.clone(), plan.steps, began, is_cold)

    def _inputs(
        self, wanted: HeadInput, plan: ChainPlan, shape: ChainShape, uploaded: UploadedPass
    ) -> _ChainInputs:
        room, unsettled = shape.first.logit_rows, plan.unsettled
        ones, places = np.ones(len(plan.steps), np.int32), np.arange(room, dtype=np.int32)
        pieces = [
            Piece(words(plan.records["stem"]), (2 * room,), 0),
            Piece(words(plan.records["temperature"].astype(np.float64)), (2 * room,), 0),
            Piece(wanted.starts, (shape.first.rows,), 0),
            Piece(plan.lengths, (room,), 0),
            Piece(plan.steps, (room,), 0),
            Piece(plan.lengths + plan.steps if unsettled is None else unsettled.ends, (room,), 0),
            Piece(ones, (room,), 0),
            Piece(places, (room,), 0),
        ]
        if unsettled is not None:  # after what every chain has, which stays in its place
            pieces += [
                Piece(unsettled.first, (room,), 0),
                Piece(unsettled.places, (room, unsettled.places.shape[1]), -1),
            ]
        stems, temperature, starts, lengths, steps, ends, counts, rows, *judged = self._more.copy(pieces)
        gained = self._gained[:room]
        if unsettled is None:
            gained.zero_()
        else:
            run_lengths(unsettled.drawn, judged[0], unsettled.drafted, judged[1], gained)
        chain = ChainEnds(uploaded.batch.logit_rows, gained, lengths, steps, ends, stems.view(torch.int64))
        return _ChainInputs(chain, temperature.view(torch.float64), starts, RowTiles(rows, counts, rows, 1))

    def _run_chain(
        self,
        shape: ChainShape,
        uploaded: UploadedPass,
        given: _ChainInputs,
        features: Tensor,
        names: Tensor,
        store: TorchKvStore,
    ) -> Tensor:
        """int64 [levels, requests], the target's ids; -1 where there is no number."""
        batch, tables = uploaded.batch, uploaded.batch.block_tables
        sight = Sight(
            batch.positions,
            batch.prefix_lens,
            tables,
            uploaded.requests,
            store.page_size,
            False,
            given.starts,
        )
        stream, read = self._tensors.begin(batch.token_ids, features, are_own=False)
        cos_sin = self._angles(batch.positions)
        stream = self._layers(stream, read, cos_sin, sight, batch.slots, uploaded.tiles, store)
        chain = chain_places(given.ends, tables, shape.levels, store.page_size, store.spare_slot)
        last = take_rows(stream, chain.last, stream.new_empty((len(chain.last), stream.shape[1])))
        (cosines, sines), seen = self._angles(chain.positions), chain.positions + 1
        tiles = TiledRows(given.tiles, shape.parts, shape.first.splits, None)
        drawn: list[Tensor] = []
        for level in range(shape.levels):
            logits, states = self._tensors.outcome(last)
            tokens = drawn_ids(logits, given.temperature, chain.keys[level], names, shape.samples)
            drawn.append(tokens)
            if level + 1 == shape.levels:
                break
            positions, cos_sin = chain.positions[level], (cosines[level], sines[level])
            sight = Sight(
                positions, seen[level], tables, given.tiles.requests, store.page_size, False, given.starts
            )
            stream, read = self._tensors.begin(tokens.clamp(min=0), states, are_own=True)
            last = self._layers(stream, read, cos_sin, sight, chain.slots[level], tiles, store)
        return torch.stack(drawn)
