"""Sizes and habits of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.acceptance.rules.rule import Rule
from foreword.backends.interface import Decoder
from foreword.engine.gpu_memory import memory_for_kv
from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE
from foreword.kv.spec import PageSpec, RowSpec

KV_BYTES = 1 << 30
"""KV memory on a CPU, unless it is said otherwise."""


@dataclass(frozen=True)
class EngineConfig:
    """What an engine may use. Names follow vLLM's where it has one."""

    # Upper bound of KV memory. None: on a GPU what `gpu_memory_utilization` leaves; on a CPU 1 GiB, of which only those
    # pages are touched that are used.
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9  # of a GPU's memory, the share that weights, passes and KV may take
    max_model_len: int | None = None  # cap on prompt + answer; None: what the model and the cache allow
    # Rows of one target pass, guesses included; longer prompts take several.
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64  # answers that are worked on at once
    acceptance_rule: str = "coupled"  # how drafts are judged: coupled, token, block or traversal
    enable_prefix_caching: bool = True  # reuse the KV of equal beginnings, within a tenant
    max_step_seconds: float | None = 0.1  # aim for passes with prompt chunks while others decode; None: none
    max_draft_share: float = 0.03  # most that guesses may lengthen steps that also serve plain requests
    # Passes under way at once, so that a GPU need not wait for the host; None: 2 on a GPU, else 1.
    steps_ahead: int | None = None
    enforce_eager: bool = (
        False  # capture no passes on a GPU: nothing is prepared at the start, each one takes longer
    )
    speculation_policy: str | None = None  # file with rules for cohorts of requests: docs/policy.md

    def __post_init__(self) -> None:
        Rule.parse(self.acceptance_rule)
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.steps_ahead not in (None, 1, 2):
            raise RequestError(f"steps_ahead must be 1 or 2, not {self.steps_ahead}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise RequestError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        if self.max_step_seconds is not None and not self.max_step_seconds > 0:
            raise RequestError(f"max_step_seconds must be positive, not {self.max_step_seconds}")
        if not self.max_draft_share >= 0:
            raise RequestError(f"max_draft_share must be 0 or more, not {self.max_draft_share}")

    @property
    def kv_bytes(self) -> int:
        return KV_BYTES if self.kv_cache_memory_bytes is None else self.kv_cache_memory_bytes

    def fitted(self, target: Decoder) -> "EngineConfig":
        """With as much KV memory as there is room for beside this model, where nothing else is said."""
        if self.kv_cache_memory_bytes is not None or target.device.type != "cuda":
            return self
        room = memory_for_kv(target, self.gpu_memory_utilization, self.max_num_batched_tokens)
        return replace(self, kv_cache_memory_bytes=room)

    def num_pages(self, target: Decoder, extra: Sequence[RowSpec] = ()) -> int:
        """Pages of KV memory for this model, and for the `extra` rows that drafters keep in them."""
        page_bytes = PageSpec(target.kv_rows(), tuple(extra)).bytes_per_row * PAGE_SIZE
        affordable = self.kv_bytes // page_bytes
        if affordable < 1:
            raise RequestError(f"kv_cache_memory_bytes must be at least {page_bytes}, one page of KV")
        useful = -(-target.config.context_length // PAGE_SIZE) * self.max_num_seqs
        return min(affordable, useful)

    def context_length(self, target: Decoder, extra: Sequence[RowSpec] = ()) -> int:
        """Most tokens of a prompt with its answer."""
        possible = min(target.config.context_length, self.num_pages(target, extra) * PAGE_SIZE)
        if self.max_model_len is None:
            return possible
        if not 1 < self.max_model_len <= possible:
            raise RequestError(f"max_model_len must be in 2 .. {possible}, not {self.max_model_len}")
        return self.max_model_len
