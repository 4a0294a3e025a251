"""Sizes and habits of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.acceptance.rules.rule import Rule
from foreword.backends.interface import Decoder
from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE
from foreword.kv.spec import PageSpec, RowSpec


@dataclass(frozen=True)
class EngineConfig:
    """What an engine may use. Names follow vLLM's where it has one."""

    kv_cache_memory_bytes: int = 1 << 30  # upper bound of KV memory; pages are touched only when used
    max_model_len: int | None = None  # cap on prompt + answer; None: what the model and the cache allow
    # Rows of one target pass, guesses included; longer prompts take several.
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64  # answers that are worked on at once
    acceptance_rule: str = "coupled"  # how drafts are judged: coupled, token, block or traversal
    enable_prefix_caching: bool = True  # reuse the KV of equal beginnings, within a tenant
    max_step_seconds: float | None = 0.1  # aim for passes with prompt chunks while others decode; None: none
    max_draft_share: float = 0.04  # most that guesses may lengthen steps that also serve plain requests
    speculation_policy: str | None = None  # file with rules for cohorts of requests: docs/policy.md

    def __post_init__(self) -> None:
        Rule.parse(self.acceptance_rule)
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_step_seconds is not None and not self.max_step_seconds > 0:
            raise RequestError(f"max_step_seconds must be positive, not {self.max_step_seconds}")
        if not self.max_draft_share >= 0:
            raise RequestError(f"max_draft_share must be 0 or more, not {self.max_draft_share}")

    def num_pages(self, target: Decoder, extra: Sequence[RowSpec] = ()) -> int:
        """Pages of KV memory for this model, and for the `extra` rows that drafters keep in them."""
        page_bytes = PageSpec(target.kv_rows(), tuple(extra)).bytes_per_row * PAGE_SIZE
        affordable = self.kv_cache_memory_bytes // page_bytes
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
