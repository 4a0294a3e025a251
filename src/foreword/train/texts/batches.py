"""Generates training texts in batches, on the engine or in a static KV cache."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from foreword.acceptance.noise import gumbel
from foreword.acceptance.params import SamplingParams
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.errors import RequestError
from foreword.train.passes.attention import CacheRows, Spans, decode_attention, to_device
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.passes.target import wide_logits


@dataclass
class Job:
    """A prompt to continue."""

    prompt: list[int]  # at least one token
    max_new: int
    temperature: float  # 0: greedy
    on_done: Callable[[list[int]], None]  # receives the generated tokens, including the end token


class TextBatch(Protocol):
    """Generates the texts of many jobs at the same time."""

    tokens_written: int  # generated tokens of all jobs so far

    def run(self, jobs: Iterator[Job]) -> Iterator[None]:
        """Run the jobs; yield regularly until all have ended."""


NO_TOKEN = -1  # stands for the token of an idle row


class HostTexts:
    """Generated tokens of the texts in progress, one text per row, on the host.

    Array operations add the tokens to all rows. Only rows whose text has ended are handled in a loop.
    """

    def __init__(self, rows: int, context: int, stops: np.ndarray) -> None:
        """Create idle rows; `stops` [vocabulary] is true for tokens that end a text."""
        self._stops = stops
        self._jobs: list[Job | None] = [None] * rows
        self._tokens = np.zeros((rows, context), dtype=np.int64)
        self._lengths = np.zeros(rows, dtype=np.int64)
        self._max_lengths = np.zeros(rows, dtype=np.int64)
        self.free = list(range(rows))  # rows without a job

    @property
    def in_flight(self) -> int:
        """Return the number of rows with a job."""
        return len(self._jobs) - len(self.free)

    def begin(self, row: int, job: Job) -> None:
        """Start a job in a row, which the caller has removed from `free`."""
        self._jobs[row], self._lengths[row], self._max_lengths[row] = job, 0, job.max_new

    def collect(self, written: np.ndarray) -> int:
        """Add generated tokens [steps, rows], report ended texts, and return the number of tokens."""
        by_row = written.T
        # A row that becomes idle has no token in any later step, so its tokens are those of the first steps.
        rows, steps = (by_row != NO_TOKEN).nonzero()
        self._tokens[rows, self._lengths[rows] + steps] = by_row[rows, steps]
        self._lengths += np.bincount(rows, minlength=len(self._lengths))
        active = np.unique(rows)
        newest = self._tokens[active, self._lengths[active] - 1]
        has_ended = self._stops[newest] | (self._lengths[active] == self._max_lengths[active])
        for row in active[has_ended]:
            job, self._jobs[row] = self._jobs[row], None
            self.free.append(int(row))
            if job is not None:
                job.on_done(self._tokens[row, : self._lengths[row]].tolist())
        return len(rows)


class EngineBatch:
    """Runs jobs as engine requests, at most `rows` at a time."""

    def __init__(self, core: EngineCore, *, rows: int, seed: int = 0) -> None:
        self._core = core
        self._rows = rows
        self._seeds = itertools.count(seed << 32)
        self._numbers = itertools.count()
        self._active: dict[str, tuple[Job, list[int]]] = {}  # job and its generated tokens, by request id
        self.tokens_written = 0

    def run(self, jobs: Iterator[Job]) -> Iterator[None]:
        """Run the jobs; yield after every pass."""
        try:
            self._admit(jobs)
            while self._active:
                self._step()
                self._admit(jobs)
                yield
        finally:
            for name in self._active:
                self._core.abort(name)
            self._active.clear()

    def _admit(self, jobs: Iterator[Job]) -> None:
        """Start jobs as requests until `rows` are active."""
        while len(self._active) < self._rows and (job := next(jobs, None)) is not None:
            name = f"text-{next(self._numbers)}"
            params = SamplingParams(
                temperature=job.temperature, max_tokens=job.max_new, seed=next(self._seeds) % 2**63
            )
            self._core.add(NewRequest(name, tuple(job.prompt), params))
            self._active[name] = job, []

    def _step(self) -> None:
        for delta in self._core.step():
            job, written = self._active[delta.request_id]
            written.extend(delta.token_ids)
            self.tokens_written += len(delta.token_ids)
            if delta.finish_reason is None:
                continue
            del self._active[delta.request_id]
            if delta.finish_reason == "error":
                raise RequestError(f"the engine could not generate a training text: {delta.error}")
            job.on_done(written)


_NEXT_KEY = 0x1E3779B97F4A7C15  # increment of the noise key per token; it is odd, so that no key repeats


class EndlessBatch:
    """Runs jobs in the rows of a static KV cache; a row whose text has ended takes the next job.

    A decoding step reads and writes only tensors at fixed addresses, so it can be captured once as a CUDA graph and
    replayed. The host reads the tokens of one group of steps while the next group runs.
    """

    def __init__(
        self,
        target: PlainTarget,
        *,
        rows: int,
        context: int,
        stop_ids: frozenset[int],
        steps: int = 8,
        prefill_tokens: int = 32768,
        seed: int = 0,
    ) -> None:
        """Allocate the cache. `context` limits the tokens of prompt and answer together; a group has `steps` steps."""
        self._target = target
        self._steps = steps
        self._context = context
        self._prefill_tokens = prefill_tokens
        device = target.device
        spec = target.attention
        shape = (rows, context, spec.num_kv_heads, spec.head_dim)
        layers = range(target.config.num_layers)
        self._keys = [torch.zeros(shape, dtype=target.dtype, device=device) for _ in layers]
        self._values = [torch.zeros(shape, dtype=target.dtype, device=device) for _ in layers]
        self._row_numbers = torch.arange(rows, device=device)
        self._cache_rows = CacheRows.of(self._row_numbers)
        generator = torch.Generator().manual_seed(seed)
        self._noise_keys = torch.randint(1 << 62, (rows,), generator=generator).to(device)
        # Newest token of each row, not yet in the KV cache.
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        # Tokens left to generate; 0: the row is idle.
        self._left = torch.zeros(rows, dtype=torch.int64, device=device)
        self._temperatures = torch.zeros(rows, device=device)
        self._written = torch.full((steps, rows), NO_TOKEN, dtype=torch.int64, device=device)
        # Index of the next step in its group.
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._stops = torch.zeros(target.config.vocab_size, dtype=torch.bool, device=device)
        self._stops[sorted(stop_ids)] = True
        self._texts = HostTexts(rows, context, self._stops.cpu().numpy())
        self._waiting: deque[Job] = deque()  # at most one job, which did not fit into the last prefill pass
        pinned = device.type == "cuda"
        # Host copies of `_written`: one is filled while the other is read.
        self._copies = [torch.empty((steps, rows), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._graph: torch.cuda.CUDAGraph | None = None
        self.tokens_written = 0

    def run(self, jobs: Iterator[Job]) -> Iterator[None]:
        """Run the jobs; yield after every group of steps."""
        pending: tuple[Tensor, torch.cuda.Event | None] | None = None
        copy_index = 0
        self._admit(jobs)
        while pending is not None or self._texts.in_flight:
            self._decode()
            copy, copy_index = self._copies[copy_index], 1 - copy_index
            copy.copy_(self._written, non_blocking=True)
            event = self._record_event()
            if pending is not None:
                self._collect(*pending)
            self._admit(jobs)
            pending = (copy, event) if self._texts.in_flight else None
            yield

    def _record_event(self) -> torch.cuda.Event | None:
        """Record an event after the launched work; None without a GPU."""
        if self._target.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _collect(self, copy: Tensor, event: torch.cuda.Event | None) -> None:
        """Wait for the copied tokens of a group of steps, and add them to the texts."""
        if event is not None:
            event.synchronize()
        self.tokens_written += self._texts.collect(copy.numpy())

    def _admit(self, jobs: Iterator[Job]) -> None:
        """Start jobs in idle rows, with prefill passes of at most `prefill_tokens` or one prompt."""
        free = self._texts.free
        while free:
            taken: list[tuple[int, Job]] = []
            size = 0
            while free:
                job = self._waiting.popleft() if self._waiting else next(jobs, None)
                if job is None:
                    break
                if size and size + len(job.prompt) > self._prefill_tokens:
                    self._waiting.appendleft(job)
                    break
                taken.append((free.pop(), job))
                size += len(job.prompt)
            if not taken:
                return
            self._prefill(taken)

    def _prefill(self, taken: list[tuple[int, Job]]) -> None:
        """Compute keys and values of all prompt tokens but the last, which the next step processes."""
        device = self._target.device
        for row, job in taken:
            self._texts.begin(row, job)
        prompts = [(row, job.prompt[:-1]) for row, job in taken if len(job.prompt) > 1]
        if prompts:
            lengths = [len(tokens) for _, tokens in prompts]
            columns = (
                np.concatenate([tokens for _, tokens in prompts], dtype=np.int64),
                np.concatenate([np.arange(length) for length in lengths]),
                np.repeat([row for row, _ in prompts], lengths),
            )
            token_ids, positions, token_rows = to_device(torch.from_numpy(np.stack(columns)), device)

            def store_kv(layer: int, k: Tensor, v: Tensor) -> None:
                self._keys[layer][token_rows, positions] = k
                self._values[layer][token_rows, positions] = v

            self._target.forward(token_ids, positions, Spans.of(lengths, device), keep_kv=store_kv)
        host = torch.tensor([[row, job.prompt[-1], len(job.prompt) - 1, job.max_new] for row, job in taken])
        rows, last_tokens, last_positions, left = to_device(host.t().contiguous(), device)
        self._tokens[rows] = last_tokens
        self._positions[rows] = last_positions
        self._left[rows] = left
        self._temperatures[rows] = to_device(torch.tensor([job.temperature for _, job in taken]), device)

    def _decode(self) -> None:
        """Run a group of steps."""
        if self._target.device.type != "cuda":
            for _ in range(self._steps):
                self._step_once()
            return
        if self._graph is None:
            self._graph = self._capture()
        for _ in range(self._steps):
            self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture the step as a CUDA graph, and restore the state that the warm-up changed."""
        state = (self._tokens, self._positions, self._left, self._step)
        saved = [tensor.clone() for tensor in state]
        self._left.zero_()  # all rows are idle in the warm-up
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step_once()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step_once()
        for tensor, old in zip(state, saved, strict=True):
            tensor.copy_(old)
        return graph

    @torch.no_grad()
    def _step_once(self) -> None:
        """Generate one token per row; idle rows compute a token that is ignored."""
        target = self._target
        rotation = target.rotation(self._positions)
        cache_rows = replace(self._cache_rows, lengths=(self._positions + 1).to(torch.int32))
        stream = embedding(self._tokens, target.weights.embedding)
        for index, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            q, k, v = target.before(index, stream, *rotation)
            keys[self._row_numbers, self._positions] = k
            values[self._row_numbers, self._positions] = v
            stream = target.after(index, stream, decode_attention(q, keys, values, cache_rows))
        logits = wide_logits(target.final_norm(stream), target.weights.head)
        drawn = _draw(logits, self._temperatures, self._noise_keys)
        self._noise_keys.add_(_NEXT_KEY)
        active = self._left > 0
        self._written.index_copy_(0, self._step, drawn.where(active, NO_TOKEN).unsqueeze(0))
        self._step.copy_((self._step + 1) % self._steps)
        self._left.sub_(active.long()).mul_((~self._stops[drawn]).long())
        self._tokens.copy_(drawn.where(active, self._tokens))
        self._positions.add_(active.long()).clamp_(max=self._context - 1)


def _draw(logits: Tensor, temperatures: Tensor, noise_keys: Tensor) -> Tensor:
    """Sample a token per row by Gumbel noise; at temperature 0, take the most likely one."""
    if logits.is_cuda:
        from foreword.kernels.triton_draw import draw_rows

        return draw_rows(logits, temperatures.double(), noise_keys, None)[0]
    ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel(noise_keys[:, None], ids) * temperatures.double().unsqueeze(1)
    return (logits.double() + noise).argmax(-1)
