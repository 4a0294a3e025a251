"""The engine that `foreword bench gpu` times, and the texts that it is given."""

from foreword.backends.interface import Decoder
from foreword.bench.costs.step_cost import random_tokens
from foreword.control.fixed import FixedPolicy
from foreword.control.measured import MeasuredPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.parts import EngineParts
from foreword.engine.profiles import measure_profile
from foreword.engine.text import Vocabulary
from foreword.speculation.drafting import Drafter

DECODED = 64
"""Tokens that every request gains while an engine is timed."""


def timed_engine(decoder: Decoder, context: int, batch: int, policy: FixedPolicy | None = None) -> EngineCore:
    """An engine with room for a batch of texts that grow by some multiples of `DECODED`."""
    return _engine(decoder, EngineParts(_config(decoder, context, batch), policy or FixedPolicy()))


def controlled_engine(decoder: Decoder, context: int, batch: int, drafter: Drafter, depth: int) -> EngineCore:
    """The same with the controller, and a drafter for those that do not decode plainly."""
    speculation = SpeculationConfig.parse({"method": "ngram", "num_speculative_tokens": depth})
    config = _config(decoder, context, batch)
    engine = _engine(decoder, EngineParts(config, MeasuredPolicy(), lambda _: drafter, speculation))
    engine.situation.costs.begin_with(0, measure_profile(engine))
    return engine


def _config(decoder: Decoder, context: int, batch: int) -> EngineConfig:
    length = context + 5 * DECODED
    row_bytes = decoder.kv_rows().bytes_per_row * 2  # guesses, and a head's rows, which are far fewer
    return EngineConfig(
        kv_cache_memory_bytes=batch * (length + 128) * row_bytes,
        max_model_len=length,
        max_num_seqs=batch,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        max_draft_share=1e9,
    )


def _engine(decoder: Decoder, parts: EngineParts) -> EngineCore:
    return EngineCore(decoder, Vocabulary(decoder.config.vocab_size), parts)


def random_prompts(decoder: Decoder, context: int, batch: int) -> list[list[int]]:
    return [random_tokens(context + 1, decoder.config.vocab_size)[1:] for _ in range(batch)]
