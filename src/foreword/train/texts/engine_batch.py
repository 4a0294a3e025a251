"""Jobs through our engine: the way on a CPU, where its kernels and guesses are faster than plain torch."""

import itertools
from collections.abc import Iterator

from foreword.acceptance.params import SamplingParams
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.errors import RequestError
from foreword.train.texts.jobs import Job, Row


class EngineBatch:
    """Keeps as many requests under way as it has rows."""

    def __init__(self, core: EngineCore, *, rows: int, seed: int = 0) -> None:
        self._core = core
        self._rows = rows
        self._seeds = itertools.count(seed << 32)
        self._numbers = itertools.count()
        self._active: dict[str, Row] = {}
        self.tokens_written = 0

    def run(self, jobs: Iterator[Job]) -> Iterator[None]:
        """Work on `jobs`, and yield after every pass; ends when there is nothing left to do."""
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
        while len(self._active) < self._rows and (job := next(jobs, None)) is not None:
            name = f"text-{next(self._numbers)}"
            params = SamplingParams(
                temperature=job.temperature, max_tokens=job.max_new, seed=next(self._seeds) % 2**63
            )
            self._core.add(NewRequest(name, tuple(job.prompt), params))
            self._active[name] = Row(job)

    def _step(self) -> None:
        for delta in self._core.step():
            row = self._active[delta.request_id]
            row.written.extend(delta.token_ids)
            self.tokens_written += len(delta.token_ids)
            if delta.finish_reason is None:
                continue
            del self._active[delta.request_id]
            if delta.finish_reason == "error":
                raise RequestError(f"a text could not be written: {delta.error}")
            row.job.on_done(row.written)
