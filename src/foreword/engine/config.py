"""Engine settings, and the parts that replace the defaults."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from foreword.acceptance.rules.rule import Rule
from foreword.backends.interface import Decoder
from foreword.backends.memory import device_memory, peak_bytes
from foreword.backends.runner import ModelRunner
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.drafting.drafter_pool import Build, DrafterPool
from foreword.engine.policy.controller import PolicyFileController
from foreword.errors import RequestError
from foreword.kv.chunks import NO_STATES, RING_ROWS, StateSizes
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.spare_rows import SpareRows
from foreword.kv.spec import PageSpec, RowSpec, StateSpec
from foreword.models.heads.writing import head_sizes
from foreword.speculation.draft import NO_DRAFT
from foreword.speculation.drafting import Drafter
from foreword.speculation.layout import BatchBuffers, SequenceRows
from foreword.speculation.protocols import Policy

GIB = 1 << 30


def memory_for_kv(target: Decoder, utilization: float, max_rows: int) -> int | None:
    """Return the bytes for KV: `utilization` of the GPU memory, without what is in use and what a pass needs.

    Return None without a GPU.
    """
    if device_memory(target.device) is None:
        return None
    needed = _largest_pass(target, min(max_rows, target.config.context_length))
    free, total = device_memory(target.device) or (0, 0)  # after the pass, which may have allocated more
    kv_bytes = int(total * utilization) - (total - free) - needed
    if kv_bytes < target.kv_rows().bytes_per_row * PAGE_SIZE:
        raise RequestError(
            f"no memory is left for KV: of {total / GIB:.1f} GiB on the GPU {(total - free) / GIB:.1f} are in use, "
            f"a pass of {max_rows} tokens needs {needed / GIB:.1f}, and gpu_memory_utilization is {utilization:g}; "
            "raise it, lower max_num_batched_tokens, or use a smaller model"
        )
    return kv_bytes


def _largest_pass(target: Decoder, rows: int) -> int:
    """Measure the activation bytes of a pass over this many prompt tokens, by running it."""
    states = NO_STATES if target.config.recurrent is None else StateSizes(1)
    cache = PagedCache(-(-rows // PAGE_SIZE), states=states)
    runner = ModelRunner.allocate(target, cache.pool.num_pages, PAGE_SIZE, states=states)
    sequence = cache.open()
    cache.reserve(sequence, rows)
    cache.enter_chunk(sequence, rows)
    prompt = SequenceRows(sequence, [0] * rows, rows, NO_DRAFT)
    batch = BatchBuffers(entries=0).lay_out(cache, [prompt], ())
    return peak_bytes(target.device, lambda: runner.forward(batch))


def sequence_bytes(spec: StateSpec) -> int:
    """Return the maximum bytes of a running request: two states and two rings, while a pass enters a chunk."""
    return 2 * (spec.bytes_per_state + RING_ROWS * spec.bytes_per_row)


KV_BYTES = 1 << 30  # default KV memory on a CPU, in bytes


@dataclass(frozen=True)
class EngineConfig:
    """Resource limits and behaviour of an engine. Names follow vLLM where it has one."""

    # Upper bound of KV memory. None: what `gpu_memory_utilization` leaves; on a CPU 1 GiB, allocated lazily.
    kv_cache_memory_bytes: int | None = None
    # Upper bound of the states that recurrent layers keep for the prefix cache. None: a quarter of the KV memory.
    state_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9  # fraction of GPU memory for weights, activations and KV
    max_model_len: int | None = None  # limit of prompt + answer tokens; None: what model and cache allow
    # Tokens per target pass, including draft tokens; longer prompts take several passes.
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64  # concurrently running answers
    acceptance_rule: str = "coupled"  # coupled, token, block or traversal
    enable_prefix_caching: bool = True  # reuse KV of common prefixes within a tenant
    max_step_seconds: float | None = 0.1  # of a step with prompt chunks while others decode; None: no limit
    max_draft_share: float = 0.03  # maximum slow-down that drafts cause to plain requests of the same step
    # Passes in flight at once, so that a GPU does not wait for the host; None: 2 on a GPU, otherwise 1.
    steps_ahead: int | None = None
    enforce_eager: bool = False  # no CUDA graphs: faster start, slower passes
    speculation_policy: str | None = None  # policy file with rules per cohort: docs/policy.md
    # EAGLE-3 heads that may be loaded later beside those of the start; each takes KV memory from the start on.
    spare_heads: int = 0

    def __post_init__(self) -> None:
        Rule.parse(self.acceptance_rule)
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.spare_heads < 0:
            raise RequestError(f"spare_heads must be 0 or more, not {self.spare_heads}")
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
        """Bytes of KV memory, including states of recurrent layers."""
        return KV_BYTES if self.kv_cache_memory_bytes is None else self.kv_cache_memory_bytes

    def fitted(self, target: Decoder) -> "EngineConfig":
        """Return the configuration with the KV memory that this model leaves free on a GPU, unless it is set."""
        if self.kv_cache_memory_bytes is not None:
            return self
        kv_bytes = memory_for_kv(target, self.gpu_memory_utilization, self.max_num_batched_tokens)
        return replace(self, kv_cache_memory_bytes=kv_bytes)

    def spare_rows(self, target: Decoder) -> tuple[RowSpec, ...]:
        """Return the KV rows of `spare_heads` EAGLE-3 heads, as `foreword train eagle3` makes them for this model."""
        if not self.spare_heads:
            return ()
        sizes = head_sizes(target.config)
        shape = RowSpec("spare", 1, sizes.num_kv_heads, sizes.head_dim)
        return tuple(replace(shape, name=f"spare {number}") for number in range(1, self.spare_heads + 1))

    def state_sizes(self, target: Decoder) -> StateSizes:
        """Return the number of states for running requests, within half of the KV memory, and for the prefix cache."""
        spec = target.state_spec()
        if spec is None:
            return NO_STATES
        affordable = self.kv_bytes // 2 // sequence_bytes(spec)
        if affordable < 2:
            raise RequestError(
                f"kv_cache_memory_bytes must be at least {4 * sequence_bytes(spec)}, twice the states of two requests"
            )
        # One more than may run: `KeptPrompts` may hold a prompt for further answers to it.
        sequences = min(affordable, 1 + min(self.max_num_seqs, self.max_num_batched_tokens))
        budget = self.kv_bytes // 4 if self.state_cache_bytes is None else self.state_cache_bytes
        return StateSizes(sequences, budget // spec.bytes_per_state if self.enable_prefix_caching else 0)

    def num_pages(self, target: Decoder, extra: Sequence[RowSpec] = ()) -> int:
        """Return the number of KV pages for this model and the `extra` rows of drafters."""
        page_bytes = PageSpec(target.kv_rows(), tuple(extra)).bytes_per_row * PAGE_SIZE
        affordable = (self.kv_bytes - self._state_bytes(target)) // page_bytes
        if affordable < 1:
            raise RequestError(f"kv_cache_memory_bytes must be at least {page_bytes}, one page of KV")
        useful = -(-target.config.context_length // PAGE_SIZE) * self.max_num_seqs
        return min(affordable, useful)

    def _state_bytes(self, target: Decoder) -> int:
        """Return the part of the KV memory for states: of running requests, and of the prefix cache.

        The prefix cache's states are not part of it if `state_cache_bytes` gives them a budget of their own.
        """
        spec, sizes = target.state_spec(), self.state_sizes(target)
        if spec is None:
            return 0
        cached = sizes.checkpoints * spec.bytes_per_state if self.state_cache_bytes is None else 0
        return sizes.sequences * sequence_bytes(spec) + cached

    def context_length(self, target: Decoder, extra: Sequence[RowSpec] = ()) -> int:
        """Return the maximum number of prompt and answer tokens."""
        possible = min(target.config.context_length, self.num_pages(target, extra) * PAGE_SIZE)
        if self.max_model_len is None:
            return possible
        if not 1 < self.max_model_len <= possible:
            raise RequestError(f"max_model_len must be in 2 .. {possible}, not {self.max_model_len}")
        return self.max_model_len


@dataclass(frozen=True)
class EngineParts:
    """Components of an engine that callers may replace."""

    config: EngineConfig = field(default_factory=EngineConfig)
    policy: Policy = field(default_factory=FixedPolicy)  # selects drafters and draft sizes
    build_drafter: Build | None = None  # creates drafters that requests name; None: requests cannot name any
    speculation: SpeculationConfig | None = None  # drafter of requests that name none
    clock: Callable[[], float] = perf_counter  # seconds
    # Drafters that requests may name, created at the start; the KV pages have room for their rows too.
    offered: Sequence[SpeculationConfig] = ()
    policy_file: PolicyFileController | None = None  # the operator's policy file
    spare_rows: SpareRows = field(default_factory=SpareRows)  # the one that `build_drafter` places rows with

    def drafter_pool(self, rule: Rule, policy_drafters: Iterable[Drafter], num_layers: int) -> DrafterPool:
        """Return the pool of an engine's drafters; `num_layers` are those of the target."""
        return DrafterPool(
            self.build_drafter, rule, self.speculation, policy_drafters, num_layers, self.spare_rows
        )
