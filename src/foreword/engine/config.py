"""Sizes and habits of an engine, and the parts that it may be given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from foreword.acceptance.rules.rule import Rule
from foreword.backends.interface import Decoder
from foreword.backends.memory import device_memory, peak_bytes
from foreword.backends.runner import ModelRunner
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.drafting.drafter_pool import Build
from foreword.engine.policy.steering import Steering
from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.spec import PageSpec, RowSpec
from foreword.speculation.draft import NO_DRAFT
from foreword.speculation.layout import BatchBuffers, SequenceRows
from foreword.speculation.protocols import Policy

GIB = 1 << 30


def memory_for_kv(target: Decoder, utilization: float, max_rows: int) -> int | None:
    """Return the bytes for KV within this share of a GPU, beside what the largest pass needs; None: no GPU."""
    if device_memory(target.device) is None:
        return None
    needed = _largest_pass(target, min(max_rows, target.config.context_length))
    free, total = device_memory(target.device) or (0, 0)
    room = int(total * utilization) - (total - free) - needed
    if room < target.kv_rows().bytes_per_row * PAGE_SIZE:
        raise RequestError(
            f"no memory is left for KV: of {total / GIB:.1f} GiB on the GPU {(total - free) / GIB:.1f} are in use, "
            f"a pass of {max_rows} tokens needs {needed / GIB:.1f}, and gpu_memory_utilization is {utilization:g}; "
            "raise it, lower max_num_batched_tokens, or use a smaller model"
        )
    return room


def _largest_pass(target: Decoder, rows: int) -> int:
    """Return the bytes that a pass over this many prompt tokens takes beside the weights and its KV rows."""
    cache = PagedCache(-(-rows // PAGE_SIZE))
    runner = ModelRunner.allocate(target, cache.pool.num_pages, PAGE_SIZE)
    sequence = cache.open()
    cache.reserve(sequence, rows)
    prompt = SequenceRows(sequence, [0] * rows, rows, NO_DRAFT)
    batch = BatchBuffers(entries=0).lay_out(cache, [prompt], ())
    return peak_bytes(target.device, lambda: runner.forward(batch))


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
    # Tokens of one target pass, draft tokens included; longer prompts take several.
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64  # answers that are worked on at once
    acceptance_rule: str = "coupled"  # how drafts are judged: coupled, token, block or traversal
    enable_prefix_caching: bool = True  # reuse the KV of equal beginnings, within a tenant
    max_step_seconds: float | None = 0.1  # aim for passes with prompt chunks while others decode; None: none
    max_draft_share: float = 0.03  # most that drafts may lengthen steps that also serve plain requests
    # Passes in flight at once, so that a GPU need not wait for the host; None: 2 on a GPU, else 1.
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
        """Return the configuration with the KV memory that is left beside this model, unless it is set."""
        if self.kv_cache_memory_bytes is not None:
            return self
        room = memory_for_kv(target, self.gpu_memory_utilization, self.max_num_batched_tokens)
        return replace(self, kv_cache_memory_bytes=room)

    def num_pages(self, target: Decoder, extra: Sequence[RowSpec] = ()) -> int:
        """Return the pages of KV memory for this model and the `extra` rows that drafters keep in them."""
        page_bytes = PageSpec(target.kv_rows(), tuple(extra)).bytes_per_row * PAGE_SIZE
        affordable = self.kv_bytes // page_bytes
        if affordable < 1:
            raise RequestError(f"kv_cache_memory_bytes must be at least {page_bytes}, one page of KV")
        useful = -(-target.config.context_length // PAGE_SIZE) * self.max_num_seqs
        return min(affordable, useful)

    def context_length(self, target: Decoder, extra: Sequence[RowSpec] = ()) -> int:
        """Return the most tokens of a prompt with its answer."""
        possible = min(target.config.context_length, self.num_pages(target, extra) * PAGE_SIZE)
        if self.max_model_len is None:
            return possible
        if not 1 < self.max_model_len <= possible:
            raise RequestError(f"max_model_len must be in 2 .. {possible}, not {self.max_model_len}")
        return self.max_model_len


@dataclass(frozen=True)
class EngineParts:
    """What an engine may be given instead of its own."""

    config: EngineConfig = field(default_factory=EngineConfig)
    policy: Policy = field(default_factory=FixedPolicy)  # which drafter drafts, and how deep
    build_drafter: Build | None = None  # makes the drafters that requests name; None: they cannot name any
    speculation: SpeculationConfig | None = None  # of requests that name none
    clock: Callable[[], float] = perf_counter  # seconds
    # Others that requests will name and that keep rows in the KV pages: these are laid out for them too.
    offered: Sequence[SpeculationConfig] = ()
    steering: Steering | None = None  # the operator's policy file
