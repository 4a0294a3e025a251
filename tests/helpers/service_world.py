"""An engine on a scripted clock whose requests say how soon they are to be served."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.control.service import Service
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Assignment, Request
from foreword.kv.paged_cache import PAGE_SIZE
from foreword.speculation.requests import DraftPlan
from helpers.engines import core_on
from helpers.pretend_store import PRETEND_ROWS
from helpers.timed_target import TimedTarget

_numbers = itertools.count()


class ServiceWorld:
    """Greedy requests of a given length on a target whose passes take 1 ms and 0.1 ms a row."""

    def __init__(
        self, seed: int = 0, pages: int = 400, policy: FixedPolicy | None = None, **config: Any
    ) -> None:
        self.rng = random.Random(seed)
        self.target: Any = TimedTarget()
        memory = pages * PAGE_SIZE * PRETEND_ROWS.bytes_per_row
        self.core: EngineCore = core_on(
            self.target, policy=policy, clock=self.target.clock, kv_cache_memory_bytes=memory, **config
        )

    def ask(
        self,
        service: Service | None = None,
        *,
        prompt: int | Sequence[int] = 4,
        tokens: int = 8,
        plan: DraftPlan | None = None,
        n: int = 1,
        **options: Any,
    ) -> Request:
        """The request, or the last of its `n` answers."""
        ids = [self.rng.randrange(12) for _ in range(prompt)] if isinstance(prompt, int) else list(prompt)
        service = service or Service()
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=1, n=n)
        new = NewRequest(
            f"service-{next(_numbers)}", tuple(ids), params, priority=service.priority, **options
        )
        assigned = Assignment(
            service=replace(service, priority=0), step_limit=service.step_seconds, plan=plan
        )
        requests = self.core.prepare(new, assigned)
        self.core.enqueue(requests)
        return requests[-1]

    @property
    def now(self) -> float:
        return self.target.clock.now  # type: ignore[no-any-return]
