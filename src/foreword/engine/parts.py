"""What an engine is made of besides its model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig
from foreword.engine.drafting.drafter_pool import Build
from foreword.engine.policy.steering import Steering
from foreword.speculation.protocols import Policy


@dataclass(frozen=True)
class EngineParts:
    """What an engine may be given instead of its own."""

    config: EngineConfig = field(default_factory=EngineConfig)
    policy: Policy = field(default_factory=FixedPolicy)  # who drafts, with what, how deep
    build_drafter: Build | None = None  # makes the drafters that requests ask for; None: they cannot ask
    speculation: SpeculationConfig | None = None  # of requests that don't ask
    clock: Callable[[], float] = perf_counter  # seconds
    # Others that requests will ask for and that keep rows in the KV pages: these are laid out for them too.
    offered: Sequence[SpeculationConfig] = ()
    steering: Steering | None = None  # the operator's policy file
