"""Draft heads on a GPU: a chain of guesses is one captured graph, without a round trip to the host between tokens."""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear as library_linear

from foreword.acceptance.transfer import event
from foreword.backends.batch import ForwardBatch
from foreword.backends.cuda.graphs import GraphsByMemory
from foreword.backends.cuda.guess_draws import GuessNames, as_chains, drawn_ids, draws_of, words
from foreword.backends.cuda.kernels.attention import PART, RowTiles, Sight
from foreword.backends.cuda.kernels.chains import ChainEnds, chain_places, run_lengths
from foreword.backends.cuda.kernels.rows import (
    add_norm,
    fill_in,
    rotate_and_keep,
    silu_times_up,
    take_rows,
)
from foreword.backends.cuda.kv_store import CudaKvStore
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
    PendingChains,
)
from foreword.backends.torch.heads import LentEnds, TorchHead
from foreword.backends.torch.upload import Piece, Upload
from foreword.kv.states import as_tensor
from foreword.models.heads.opening import Head
from foreword.models.heads.spec import Join

LIBRARY_FROM = 65
"""Rows from which on the vendor's products are used: those of a prompt. Nothing here has to keep its bits."""

_MOST_CHAINS = 1 << 12
"""Requests of one call."""

_MORE_ENTRIES = 1 << 17
"""32-bit numbers that a chain is told beside its first pass."""


@dataclass(frozen=True)
class ChainShape:
    """Everything that a captured chain has built in."""

    first: PassShape  # of the pass over committed tokens
    levels: int  # guesses
    parts: int  # of the longest text with its guesses
    samples: bool
    names: Hashable  # of the tokens that it can guess


@dataclass(frozen=True)
class _Told:
    """What a chain is told beside its first pass, on the device; requests are padded."""

    ends: ChainEnds
    temperature: Tensor  # float64 [requests]
    starts: Tensor  # int32 [requests], KV rows before these are not there
    tiles: RowTiles  # one row each


class CudaHead(TorchHead):
    """A head whose chains run on Triton kernels. Trees, and all other passes, are the reference's."""

    captured_rows = DECODE_ROWS[-1]  # of the largest pass that is captured

    def __init__(self, head: Head, rows: str, ends: LentEnds, *, captures: bool) -> None:
        super().__init__(head, rows, ends, bucketed=True)
        attention = head.spec.layers[0].attention
        self._group, self._kv_heads = attention.num_heads // attention.num_kv_heads, attention.num_kv_heads
        self._products = Products()
        self._captures = captures
        self._upload = PassUpload(ends.device)
        self._more = Upload(ends.device, _MORE_ENTRIES)
        width = head.spec.feature_width
        self._features = torch.zeros((self.captured_rows, width), dtype=ends.dtype, device=ends.device)
        self._behind = torch.zeros(_MOST_CHAINS, dtype=torch.int32, device=ends.device)
        self._graphs: GraphsByMemory[ChainShape, Tensor] = GraphsByMemory()
        self._names = GuessNames(head.spec.draft_vocab_size, ends.device)
        self._in_kernels = (
            head.spec.join is not Join.NONE and 2 * len(self._frequencies) == attention.head_dim
        )
        if self._in_kernels:
            for index in range(len(head.spec.layers)):
                self._join(index, "self_attn.", ("q_proj", "k_proj", "v_proj"))
                self._join(index, "mlp.", ("gate_proj", "up_proj"))
        self.anticipates = self._in_kernels

    def _join(self, index: int, place: str, names: tuple[str, ...]) -> None:
        """One matrix for all; those that the reference uses become parts of it."""
        whole = f"layers.{index}.{place}"
        for kind in ("weight", "bias"):
            parts = [self._weights.get(f"{whole}{name}.{kind}") for name in names]
            present = [part for part in parts if part is not None]
            if len(present) < len(parts):
                self._in_kernels &= not present
                continue
            joined = self._weights[f"{whole}joined.{kind}"] = torch.cat(present)
            sizes = [len(part) for part in present]
            for name, part in zip(names, joined.split_with_sizes(sizes), strict=True):
                self._weights[f"{whole}{name}.{kind}"] = part

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for name, tensor in self._weights.items() if "joined" not in name)

    @torch.inference_mode()
    def draft(self, call: HeadCall) -> HeadOutput | Chains:
        chains: Chains | None = None if call.plan is None else self._chains(call, call.plan)
        if chains is None and call.plan is not None and call.plan.unsettled is not None:
            chains = KnownChains(
                [[]] * len(call.plan.steps)
            )  # the reference cannot read tokens that are not known
        return super().draft(call) if chains is None else chains

    def _chains(self, call: HeadCall, plan: ChainPlan) -> PendingChains | None:
        """Return planned chains; None: the reference's logits are used.

        Filters of the distribution are left out: they would cut tokens that the target seldom draws.
        """
        names, wanted, store = self._names.of(plan), call.rows, call.store
        if not self._in_kernels or names is None or not isinstance(store, CudaKvStore):
            return None
        if len(plan.steps) > _MOST_CHAINS:
            return None
        batch = ForwardBatch.of(wanted.arrays)
        layout = Layout.of(batch, store.page_size, self._group, self._kv_heads)
        levels, unsettled = int(plan.steps.max()), plan.unsettled
        longest = int(plan.lengths.max()) + levels + (0 if unsettled is None else unsettled.places.shape[1])
        shape = ChainShape(layout.shape, levels, power_of_two(-(-longest // PART)), *draws_of(plan))
        began = event(timed=True) if self._features.is_cuda else None
        uploaded = self._upload.send(batch, layout, store.spare_slot)
        told = self._tell(wanted, plan, shape, uploaded)
        if unsettled is not None:
            fill_in(uploaded.batch.token_ids, unsettled.drawn)
        features = self._placed(as_tensor(wanted.features), layout.shape.rows)

        def body() -> Tensor:
            return self._run_chain(shape, uploaded, told, features, names, store)

        captured = self._captures and layout.shape.is_decode and uploaded.stays
        guesses, is_cold = self._graphs.of(store).run(shape, body) if captured else (body(), False)
        # Other chains may run before these guesses are verified, and a captured one has its result in one place.
        return as_chains(guesses.clone(), plan.steps, began, is_cold)

    def _placed(self, features: Tensor, rows: int) -> Tensor:
        """The features where a captured pass finds them."""
        if rows > len(self._features):
            return torch.nn.functional.pad(features.to(self._ends.dtype), (0, 0, 0, rows - len(features)))
        self._features[: len(features)] = features
        return self._features[:rows]

    def _tell(self, wanted: HeadInput, plan: ChainPlan, shape: ChainShape, uploaded: UploadedPass) -> _Told:
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
        if unsettled is not None:  # behind what every chain is told, which stays in its place
            pieces += [
                Piece(unsettled.first, (room,), 0),
                Piece(unsettled.places, (room, unsettled.places.shape[1]), -1),
            ]
        stems, temperature, starts, lengths, steps, ends, counts, rows, *judged = self._more.copy(pieces)
        behind = self._behind[:room]
        if unsettled is None:
            behind.zero_()
        else:
            first, guesses = judged
            run_lengths(unsettled.drawn, first, unsettled.guesses, guesses, behind)
        chain = ChainEnds(uploaded.batch.logit_rows, behind, lengths, steps, ends, stems.view(torch.int64))
        return _Told(chain, temperature.view(torch.float64), starts, RowTiles(rows, counts, rows, 1))

    def _run_chain(
        self,
        shape: ChainShape,
        uploaded: UploadedPass,
        told: _Told,
        features: Tensor,
        names: Tensor,
        store: CudaKvStore,
    ) -> Tensor:
        """int64 [levels, requests], the target's ids; -1 where there is no number."""
        batch, tables = uploaded.batch, uploaded.batch.block_tables
        sight = Sight(
            batch.positions, batch.prefix_lens, tables, uploaded.requests, store.page_size, False, told.starts
        )
        stream, read = self._begin(batch.token_ids, features, are_own=False)
        cos_sin = self._angles(batch.positions)
        stream = self._layers(stream, read, cos_sin, sight, batch.slots, uploaded.tiles, store)
        chain = chain_places(told.ends, tables, shape.levels, store.page_size, store.spare_slot)
        last = take_rows(stream, chain.last, stream.new_empty((len(chain.last), stream.shape[1])))
        (cosines, sines), seen = self._angles(chain.positions), chain.positions + 1
        tiles = TiledRows(told.tiles, shape.parts, shape.first.splits, None)
        guesses: list[Tensor] = []
        for level in range(shape.levels):
            normed = self._norm(last, "norm.weight")
            logits = self._narrow_logits(normed)
            tokens = drawn_ids(logits, told.temperature, chain.keys[level], names, shape.samples)
            guesses.append(tokens)
            if level + 1 == shape.levels:
                break
            positions, cos_sin = chain.positions[level], (cosines[level], sines[level])
            sight = Sight(
                positions, seen[level], tables, told.tiles.requests, store.page_size, False, told.starts
            )
            states = normed if self.spec.norm_output else last
            stream, read = self._begin(tokens.clamp(min=0), states, are_own=True)
            last = self._layers(stream, read, cos_sin, sight, chain.slots[level], tiles, store)
        return torch.stack(guesses)

    def _layers(
        self,
        stream: Tensor,
        read: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        sight: Sight,
        slots: Tensor,
        tiles: TiledRows,
        store: CudaKvStore,
    ) -> Tensor:
        """The stream after all layers."""
        keys, values = store.arrays(self._rows)
        eps, stream = self.spec.norm.eps, stream.clone()
        for index, layer in enumerate(self.spec.layers):
            prefix, attention = f"layers.{index}.", layer.attention
            if index:
                read = self._norm(stream, prefix + "input_layernorm.weight")
            qkv = self._linear(read, prefix + "self_attn.joined")
            queries = qkv.new_empty((len(qkv), attention.num_heads, attention.head_dim))
            norms = self._pair_of_norms(index)
            rotate_and_keep(qkv, cos_sin, slots, norms, eps, keys[index], values[index], queries)
            seen = attended(queries, keys[index], values[index], sight, tiles)
            delta = self._linear(seen.view(len(seen), -1), prefix + "self_attn.o_proj")
            normed = self._added(stream, delta, prefix + "post_attention_layernorm.weight")
            gate_up = self._linear(normed, prefix + "mlp.joined")
            active = silu_times_up(gate_up, gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2)))
            stream += self._linear(active, prefix + "mlp.down_proj")
        return stream

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position, float32."""
        angles = positions.unsqueeze(-1).float() * self._frequencies
        return angles.cos(), angles.sin()

    def _pair_of_norms(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Of queries and keys, if a layer has them."""
        query, key = (
            self._weights.get(f"layers.{index}.self_attn.{name}_norm.weight") for name in ("q", "k")
        )
        return None if query is None or key is None else (query, key)

    def _added(self, stream: Tensor, delta: Tensor, name: str) -> Tensor:
        """Adds to the stream, and returns it normed if the head has such a norm."""
        if not self.spec.has(name):
            return stream.add_(delta)
        return add_norm(stream, delta, self._weights[name], self.spec.norm.eps, torch.empty_like(stream))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        if x.ndim != 2 or not self.spec.has(name):
            return super()._norm(x, name)
        contiguous = x.contiguous()
        return add_norm(
            contiguous, None, self._weights[name], self.spec.norm.eps, torch.empty_like(contiguous)
        )

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[name + ".weight"], self._weights.get(name + ".bias")
        if len(x) >= LIBRARY_FROM:
            return library_linear(x, weight, bias)
        return self._products(x.contiguous(), weight, bias)

    def _logits(self, normed: Tensor) -> Tensor:
        return self._narrow_logits(normed).float()

    def _narrow_logits(self, normed: Tensor) -> Tensor:
        """In the numbers that they were computed in."""
        own = self._weights.get("lm_head.weight")
        if own is None or len(normed) >= LIBRARY_FROM:
            return super()._logits(normed)
        return self._products(normed.contiguous(), own, None)
