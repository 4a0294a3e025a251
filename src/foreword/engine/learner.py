"""Interface of a learner, which trains the engine's head on the texts that the engine serves."""

from typing import Protocol

from foreword.engine.learning import LearningReport
from foreword.engine.requests.request import Request


class TrafficLearner(Protocol):
    """Observes the traffic of an engine. All methods but `report` are called by the engine's thread."""

    @property
    def idle_seconds(self) -> float | None:
        """Maximum seconds that an idle engine waits before it calls `idle` again; None: unlimited."""

    def busy(self) -> None:
        """Record that requests are running: a trainer on the same device pauses or uses its share."""

    def idle(self) -> None:
        """Record that no request is running."""

    def ended(self, request: Request) -> None:
        """Keep the text of an ended request, if its tenant takes part."""

    def act(self, action: str, tenant: str) -> None:
        """Carry out an operator's action: "rollback", or "forget" for a tenant; log an invalid one."""

    def report(self) -> LearningReport: ...

    def close(self) -> None:
        """Stop a running training."""
