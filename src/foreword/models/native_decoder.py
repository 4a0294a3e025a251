"""The llama-family decoder on the compiled CPU kernels: one native call per pass."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from foreword.errors import RequestError
from foreword.kernels.native import choose_isa, choose_threads, native_status
from foreword.models.batch import ForwardBatch, ForwardOutput
from foreword.models.checkpoint import Checkpoint
from foreword.models.config import ModelConfig
from foreword.models.native_weights import MatrixPacker, WeightForm
from foreword.models.rope import inverse_frequencies
from foreword.models.weights import Progress

if TYPE_CHECKING:
    from foreword.kernels import _native


class NativeDecoder:
    """A target on the CPU kernels; it owns its packed weights and its KV.

    KV is float32: turning half precision into floats costs more here than reading twice the bytes.
    """

    def __init__(self, config: ModelConfig, native: "_native.Decoder", form: WeightForm) -> None:
        self.config = config
        self.form = form
        self._native = native

    @property
    def device(self) -> torch.device:
        """Where the weights and the KV are."""
        return torch.device("cpu")

    @property
    def isa(self) -> str:
        """Instruction set in use."""
        return self._native.isa

    @property
    def threads(self) -> int:
        """Threads of a pass."""
        return self._native.threads

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed matrices."""
        return self._native.weight_bytes

    def with_layers(self, layers: Sequence[int]) -> "NativeDecoder":
        """A decoder that runs only these layers of this one: the same weights, KV memory of its own."""
        config = replace(self.config, num_layers=len(layers))
        return NativeDecoder(config, self._native.with_layers(list(layers)), self.form)

    def kv_bytes_per_row(self) -> int:
        """Memory that one token's keys and values take in all layers."""
        return self._native.kv_bytes_per_row

    def allocate_kv(self, num_pages: int, page_size: int) -> None:
        """Make room for `num_pages` pages of KV; what was there is gone."""
        from foreword.kernels._native import PAGE_SIZE

        if page_size != PAGE_SIZE:
            raise RequestError(f"the CPU kernels need pages of {PAGE_SIZE} rows, not {page_size}")
        self._native.allocate_kv(num_pages)

    def verify(self, batch: ForwardBatch) -> ForwardOutput:
        """One pass over all rows of `batch`; KV rows are moved and written as it says."""
        logits = torch.empty((len(batch.logit_rows), self.config.vocab_size), dtype=torch.float32)
        layers = list(dict.fromkeys(batch.hidden_layers))
        hidden = torch.empty(
            (len(layers), len(batch.hidden_rows), self.config.hidden_size), dtype=torch.float32
        )
        self._native.verify(
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.prefix_lens,
            batch.ancestor_masks,
            batch.row_starts,
            batch.block_tables,
            batch.kv_lens,
            batch.logit_rows,
            batch.kv_copies,
            batch.hidden_rows,
            layers,
            logits,
            hidden,
        )
        return ForwardOutput(logits, dict(zip(layers, hidden, strict=True)))


def load_native_decoder(
    checkpoint: Checkpoint, form: WeightForm, *, threads: int | None = None, progress: Progress | None = None
) -> NativeDecoder:
    """Pack a checkpoint's weights and build its decoder."""
    from foreword.kernels import _native

    config = checkpoint.config
    isa, workers = choose_isa(native_status().instruction_sets), choose_threads(threads)
    native = _native.Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        inverse_frequencies=inverse_frequencies(config).contiguous(),
        isa=isa,
        threads=workers,
    )
    packer = MatrixPacker(checkpoint, form, isa, workers, progress)
    embedding = packer.matrices(["model.embed_tokens.weight"], biased=False)[0]
    for index in range(config.num_layers):
        _add_layer(native, packer, config, f"model.layers.{index}.")
    final_norm = packer.vector("model.norm.weight")
    head = embedding if config.tied_embeddings else packer.matrices(["lm_head.weight"], biased=False)[0]
    native.set_ends(embedding, head, final_norm)
    return NativeDecoder(config, native, form)


def _add_layer(native: "_native.Decoder", packer: MatrixPacker, config: ModelConfig, prefix: str) -> None:
    def matrices(names: str, biased: bool) -> "list[_native.PackedMatrix]":
        return packer.matrices([f"{prefix}{name}.weight" for name in names.split()], biased)

    native.add_layer(
        packer.vector(prefix + "input_layernorm.weight"),
        packer.vector(prefix + "post_attention_layernorm.weight"),
        [
            *matrices("self_attn.q_proj self_attn.k_proj self_attn.v_proj", config.attention_bias),
            *matrices("self_attn.o_proj", config.output_bias),
            *matrices("mlp.gate_proj mlp.up_proj", config.mlp_bias),
            *matrices("mlp.down_proj", config.mlp_bias),
        ],
        packer.vector(prefix + "self_attn.q_norm.weight") if config.qk_norm else None,
        packer.vector(prefix + "self_attn.k_norm.weight") if config.qk_norm else None,
    )
