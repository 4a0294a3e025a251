"""What became of one request, as plain times and counts."""

from dataclasses import dataclass, field
from enum import StrEnum


class Ending(StrEnum):
    """How a request ended. Only the completed ones enter latencies and throughput."""

    COMPLETED = "completed"
    DROPPED = "dropped on purpose"
    REFUSED = "HTTP error"
    TIMEOUT = "timeout"
    NO_CONNECTION = "no connection"
    CUT_OFF = "cut off by the server"
    REPORTED = "error in the stream"
    MALFORMED = "malformed answer"


@dataclass(frozen=True)
class ContentChunk:
    """One arrival of text."""

    time: float
    tokens: int | None  # tokens that came with it and since the chunk of text before; None: not known


@dataclass
class Outcome:
    """One request, filled in while it runs; times are seconds of one monotonic clock."""

    due: float  # when it was to be sent: latencies count from here
    sent: float | None = None  # when all of it had been written to a connection; None: it never was
    over: float = 0.0  # when nothing more was to come, for whatever reason
    ending: Ending | None = None
    detail: str = ""  # of a failure
    status: int | None = None  # HTTP status, once there is one
    retry_after: str | None = None  # what the server sent with a refusal
    chunks: list[ContentChunk] = field(default_factory=list)
    last: float | None = None  # arrival of the last chunk of the answer, with text or with the finish reason
    prompt_tokens: int | None = None  # from usage
    usage_tokens: int | None = None  # output tokens from usage
    drop_after: int | None = None  # content chunks after which it was to be dropped
