"""Reports of a learner, which trains the engine's head on the texts that the engine serves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VersionReport:
    """A trained version of the head."""

    number: int
    stage: str  # of its roll-out; "off" or "held": not used
    reason: str  # why it is in this stage
    created: float  # seconds since 1970
    tokens: int  # answer tokens that it was trained on, without those of earlier versions
    train_seconds: float
    # Tokens per pass on held-out texts of the traffic, of the head from which the training began and of this version.
    tau_before: float
    tau_after: float


@dataclass(frozen=True)
class LearningReport:
    """State of a learner; counters start with the engine."""

    state: (
        str  # "collecting", "training", "paused" (a training waits for idle time), "rolling out" or "failed"
    )
    reason: str = ""  # why the last training failed
    texts: int = 0  # kept texts
    tokens: int = 0  # their tokens
    new_tokens: int = 0  # answer tokens since the last training
    wanted_tokens: int = 0  # new answer tokens that begin a training
    trainings: int = 0  # ended trainings, those that failed included
    failures: int = 0
    train_seconds: float = 0.0  # time in which a trainer ran
    busy_seconds: float = 0.0  # the part of it in which requests were running
    version: int | None = (
        None  # newest version in use for all requests; None: the head that the engine started with
    )
    versions: tuple[VersionReport, ...] = ()  # kept versions, oldest first
