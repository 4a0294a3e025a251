"""The engine that `foreword bench gpu` times, and the texts that it is given."""

from foreword.backends.interface import Decoder
from foreword.bench.costs.step_cost import random_tokens
from foreword.control.fixed import FixedPolicy
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.parts import EngineParts
from foreword.engine.vocabulary import Vocabulary

DECODED = 64
"""Tokens that every request gains while an engine is timed."""


def timed_engine(decoder: Decoder, context: int, batch: int, policy: FixedPolicy | None = None) -> EngineCore:
    """An engine with room for a batch of texts that grow by some multiples of `DECODED`."""
    length = context + 5 * DECODED
    row_bytes = decoder.kv_rows().bytes_per_row * 2  # guesses, and a head's rows, which are far fewer
    config = EngineConfig(
        kv_cache_memory_bytes=batch * (length + 128) * row_bytes,
        max_model_len=length,
        max_num_seqs=batch,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        max_draft_share=1e9,
    )
    parts = EngineParts(config, policy or FixedPolicy())
    return EngineCore(decoder, Vocabulary(decoder.config.vocab_size), parts)


def random_prompts(decoder: Decoder, context: int, batch: int) -> list[list[int]]:
    return [random_tokens(context + 1, decoder.config.vocab_size)[1:] for _ in range(batch)]
