"""Medusa heads and early exits in plain torch, and the factory that loads all heads of a torch decoder."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from foreword.backends.batch import ForwardBatch
from foreword.backends.interface import Chains, HeadCall, HeadInput, HeadOutput, KvStore, MedusaCall
from foreword.backends.torch.adapters import LayerAdapters
from foreword.backends.torch.attention import PagedKv, views_from_start
from foreword.backends.torch.heads import HeadTensors, TargetMatrices, TorchHead
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.stack import TorchStack
from foreword.backends.torch.weights import DecoderWeights
from foreword.kv.spec import DECODER_ROWS
from foreword.kv.states import as_tensor
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.opening import Head


class TorchMedusa:
    """Medusa heads, which read only hidden states. The tensors of all heads are stacked."""

    def __init__(self, head: Head, target: TargetMatrices) -> None:
        self.spec = spec = head.spec
        self._target = target

        def stacked(group: str, name: str) -> Tensor:
            """Return the tensors `group.NUMBER.name` of all heads, [heads, ...]."""
            names = [f"{group}.{number}.{name}" for number in range(spec.num_heads)]
            return torch.stack([head.load(name, target.dtype) for name in names]).to(target.device)

        def biases(block: int) -> Tensor:
            names = [f"blocks.{number}.layers.{block}.bias" for number in range(spec.num_heads)]
            no_bias = torch.zeros(spec.hidden_size, dtype=target.dtype)
            loaded = [head.load(name, target.dtype) if spec.has(name) else no_bias for name in names]
            return torch.stack(loaded).to(target.device)

        # Weight [heads, in, out] and bias [heads, out] of every residual block
        self._blocks = [
            (stacked("blocks", f"layers.{block}.weight").transpose(1, 2), biases(block))
            for block in range(spec.blocks_per_head)
        ]
        has_outputs = spec.has("lm_heads.0.weight")
        self._outputs = stacked("lm_heads", "weight").transpose(1, 2) if has_outputs else None

    @property
    def weight_bytes(self) -> int:
        outputs = 0 if self._outputs is None else self._outputs.nbytes
        return outputs + sum(weight.nbytes + bias.nbytes for weight, bias in self._blocks)

    def logits(self, states: Tensor, heads: int) -> Tensor:
        """Return logits of the first `heads` heads: float32 [heads, rows, draft vocabulary]."""
        stream = states.to(self._target.dtype).expand(heads, -1, -1)
        for weight, bias in self._blocks:
            stream = stream + silu(torch.baddbmm(bias[:heads].unsqueeze(1), stream, weight[:heads]))
        if self._outputs is None:
            return self._target.project(stream).float()
        return torch.bmm(stream, self._outputs[:heads]).float()

    @torch.inference_mode()
    def draft(self, call: MedusaCall) -> HeadOutput | Chains:
        """Return logits and states; the caller draws the chains."""
        logits = self.logits(call.states, self.spec.num_heads)
        return HeadOutput(logits.transpose(0, 1), call.states)


class TorchExit:
    """An early exit: the target's first layers on its own KV rows, then one layer with its own rows."""

    is_ready = True

    def __init__(self, stack: TorchStack, row_name: str, weight_bytes: int) -> None:
        """`stack` has the target's first layers and the exit's layer; `weight_bytes` counts only the exit's."""
        self._stack = stack
        self._row_name = row_name
        self.weight_bytes = weight_bytes

    @torch.inference_mode()
    def draft(self, call: HeadCall) -> HeadOutput:
        """Store the target's features if the rows have some; otherwise run the rows from their tokens."""
        logits = self._logits(call.rows, call.store)
        return HeadOutput(logits, logits.new_empty(len(logits), 0))

    def _logits(self, head_input: HeadInput, store: KvStore) -> Tensor:
        if not isinstance(store, TorchKvStore):
            raise ValueError("the KV store was made for another backend")
        stack = self._stack
        staged = stack.staging.stage(ForwardBatch.of(head_input.arrays), store.page_size, store.spare_slot)
        batch, last_layer = staged.batch, stack.config.num_layers - 1
        slots, cos_sin = batch.slots.long(), stack.cos_sin(batch.positions)
        exit_keys, exit_values = store.arrays(self._row_name)
        keys, values = store.arrays(DECODER_ROWS)
        if not head_input.are_head_states:
            padding = len(batch.token_ids) - len(head_input.features)
            states = as_tensor(head_input.features).to(stack.weights.dtype)
            states = torch.nn.functional.pad(states, (0, 0, 0, padding))
            stack.layers.store_kv(
                last_layer, states, cos_sin[last_layer], PagedKv(exit_keys[0], exit_values[0], slots, [])
            )
            return torch.empty((0, stack.config.vocab_size), device=stack.weights.device)
        stream, views = stack.embed(batch.token_ids), stack.views(staged, store)
        for index, spec in enumerate(stack.config.layers):
            visible_views = views[spec.attention.window]
            kv = PagedKv(keys[index], values[index], slots, visible_views)
            if index == last_layer:
                kv = PagedKv(
                    exit_keys[0],
                    exit_values[0],
                    slots,
                    views_from_start(head_input, staged, visible_views, store.empty_slot),
                )
            stream = stack.layers.run(index, stream, cos_sin[index], kv, LayerAdapters())
        return stack.logits(stack.final_norm(stream[batch.logit_rows]))[: staged.num_logits]


class TorchHeads:
    """Loads heads for a decoder, in the decoder's number format."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, bucketed: bool) -> None:
        self._config = config
        self._weights = weights
        self._bucketed = bucketed

    def head(self, head: Head, row_name: str) -> TorchHead:
        return TorchHead(HeadTensors(head, TargetMatrices.of(self._weights)), row_name, self._bucketed)

    def medusa(self, head: Head) -> TorchMedusa:
        return TorchMedusa(head, TargetMatrices.of(self._weights))

    def exit(self, checkpoint: Checkpoint, layer: int, row_name: str) -> TorchExit | None:
        """Load an exit: the target's first `layer` layers, then the layer of `checkpoint`.

        None for a target with latent attention or recurrent layers.
        """
        if self._config.layers[0].attention.latent is not None or self._config.recurrent is not None:
            return None
        target_layers = self._weights.with_layers(range(layer))
        weights = target_layers.followed_by(checkpoint)
        config = self._config.with_layers(range(layer)).followed_by(checkpoint.config)
        stack = TorchStack(config, weights, self._bucketed)
        return TorchExit(stack, row_name, weights.layer_bytes - target_layers.layer_bytes)
