"""A decoder together with the memory that its passes read and write."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.backends.interface import Decoder, KvStore
from foreword.kv.spec import RowSpec


@dataclass(frozen=True)
class ModelRunner:
    """What whoever runs passes holds: the engine, a drafter with a model of its own, a benchmark."""

    decoder: Decoder
    store: KvStore

    @staticmethod
    def allocate(
        decoder: Decoder, num_pages: int, page_size: int, extra: Sequence[RowSpec] = ()
    ) -> "ModelRunner":
        """A decoder with fresh memory."""
        return ModelRunner(decoder, decoder.new_kv_store(num_pages, page_size, extra))

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One pass."""
        return self.decoder.forward(batch, self.store)
