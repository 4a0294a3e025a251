"""A decoder together with the KV store of its passes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from foreword.backends.batch import ForwardBatch, ForwardOutput, resolve_ids
from foreword.backends.interface import Decoder, KvStore
from foreword.errors import RequestError
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.spec import PageSpec, RowSpec


@dataclass(frozen=True)
class ModelRunner:
    """A decoder and a KV store, for the engine, a drafter or a benchmark."""

    decoder: Decoder
    store: KvStore
    vocab_size: int  # number of ids that can be sampled, and of columns of the logits

    @staticmethod
    def allocate(
        decoder: Decoder,
        num_pages: int,
        page_size: int,
        extra: Sequence[RowSpec] = (),
        vocab_size: int | None = None,
        states: StateSizes = NO_STATES,
    ) -> "ModelRunner":
        """Allocate a KV store for a decoder. None as `vocab_size`: every row of its embedding is a token."""
        try:
            store = decoder.new_kv_store(num_pages, page_size, extra, states)
        except torch.OutOfMemoryError:
            size = PageSpec(decoder.kv_rows(), tuple(extra)).bytes_per_row * page_size * num_pages / 2**30
            raise RequestError(
                f"the KV cache of {num_pages * page_size} tokens needs {size:.1f} GiB, which the GPU does not have; "
                "lower the context, the batch or the KV memory"
            ) from None
        return ModelRunner(decoder, store, decoder.config.vocab_size if vocab_size is None else vocab_size)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one pass; return logits for exactly the ids that can be sampled.

        Logits of padding in the embedding are removed. A draft model may have fewer tokens than the target: it never
        drafts the missing tokens, and reads its last token in their place.
        """
        batch = _resolve_on_host(batch)
        decoder_size, vocab_size = self.decoder.config.vocab_size, self.vocab_size
        if decoder_size == vocab_size:
            return self.decoder.forward(batch, self.store)
        if decoder_size > vocab_size:
            output = self.decoder.forward(batch, self.store)
            return replace(output, logits=output.logits[:, :vocab_size])
        in_range = replace(batch, token_ids=batch.token_ids.clamp(max=decoder_size - 1))
        output = self.decoder.forward(in_range, self.store)
        return replace(output, logits=pad(output.logits, (0, vocab_size - decoder_size), value=-torch.inf))


def _resolve_on_host(batch: ForwardBatch) -> ForwardBatch:
    """Replace ids that refer to tokens of the previous pass if these are on the host; a device replaces them itself."""
    if batch.drawn_before is None or batch.drawn_before.device.type != "cpu":
        return batch
    return replace(batch, token_ids=resolve_ids(batch.token_ids, batch.drawn_before), drawn_before=None)
